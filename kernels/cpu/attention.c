/* Causal attention over packed sequences, row by row. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/attention.h"

static void check_shape(AttnShape s) {
  require(s.n_heads > 0 && s.n_kv_heads > 0 && s.n_heads % s.n_kv_heads == 0);
  require(s.head_dim > 0 && s.window >= 0);
}

static int32_t longest(Segments seg) {
  int32_t most = 0;
  for (int b = 0; b < seg.n_seqs; b++)
    if (seg.offsets[b + 1] - seg.offsets[b] > most) most = seg.offsets[b + 1] - seg.offsets[b];
  return most;
}

/* First key that token t of a sequence sees. */
static int64_t first_key(AttnShape s, int64_t t) {
  return s.window > 0 ? max_i64(0, t + 1 - s.window) : 0;
}

void cpu_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                       Tensor lse_NH) {
  check_shape(s);
  int64_t n = qkv_NQ.dim[0], q = qkv_NQ.dim[1], D = s.head_dim, H = s.n_heads, K = s.n_kv_heads;
  require(is_f32(qkv_NQ, 2) && q == (H + 2 * K) * D && is_f32_2d(out_NHD, n, H * D));
  require((!lse_NH.data || is_f32_2d(lse_NH, n, H)) && seg.offsets[seg.n_seqs] == n);
  int64_t longest_seq = longest(seg);
#pragma omp parallel num_threads(d->threads) if (n * q >= PARALLEL_MIN)
  {
    float *score = mem_alloc((size_t)longest_seq + 1, sizeof(float));
    for (int b = 0; b < seg.n_seqs; b++) {
      int64_t start = seg.offsets[b], len = seg.offsets[b + 1] - start;
      const float *base = tensor_f32(qkv_NQ) + start * q;
#pragma omp for schedule(static, 8) collapse(2) nowait
      for (int64_t h = 0; h < H; h++)
        for (int64_t t = 0; t < len; t++) {
          int64_t j0 = first_key(s, t);
          const float *k = base + (H + h / (H / K)) * D + j0 * q, *v = k + K * D;
          float *out = tensor_f32(out_NHD) + (start + t) * H * D + h * D;
          float lse = attend_row(D, s.scale, base + t * q + h * D, t + 1 - j0, k, v, q, score, out);
          if (lse_NH.data) tensor_f32(lse_NH)[(start + t) * H + h] = lse;
        }
    }
    free(score);
  }
}

typedef struct BwdHead {
  int64_t len, q, D, hd; /* rows of qkv are q wide, rows of out hd */
  AttnShape s;
  const float *q_row, *k, *v, *out, *dout, *lse;
  float *dq, *dk, *dv;
  int64_t lse_stride;
} BwdHead;

/* With p = exp(scale q.k - lse): dv_j += p dout, ds = p (dout.v_j - dout.out), dq += scale ds k_j,
 * dk_j += scale ds q. */
static void attention_bwd_row(const BwdHead *a, int64_t t) {
  const float *q = a->q_row + t * a->q, *dout = a->dout + t * a->hd, *out = a->out + t * a->hd;
  float *dq = a->dq + t * a->q, delta = 0, lse = a->lse[t * a->lse_stride];
#pragma omp simd reduction(+ : delta)
  for (int64_t i = 0; i < a->D; i++) delta += dout[i] * out[i];
  for (int64_t j = first_key(a->s, t); j <= t; j++) {
    const float *k = a->k + j * a->q, *v = a->v + j * a->q;
    float *dk = a->dk + j * a->q, *dv = a->dv + j * a->q, score = 0, dp = 0;
#pragma omp simd reduction(+ : score, dp)
    for (int64_t i = 0; i < a->D; i++) {
      score += q[i] * k[i];
      dp += dout[i] * v[i];
    }
    float p = exp_f32(score * a->s.scale - lse), ds = p * (dp - delta) * a->s.scale;
#pragma omp simd
    for (int64_t i = 0; i < a->D; i++) {
      dq[i] += ds * k[i];
      dk[i] += ds * q[i];
      dv[i] += p * dout[i];
    }
  }
}

void cpu_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Tensor dqkv_NQ) {
  check_shape(s);
  int64_t n = qkv_NQ.dim[0], q = qkv_NQ.dim[1], D = s.head_dim, H = s.n_heads, K = s.n_kv_heads;
  require(is_f32(qkv_NQ, 2) && q == (H + 2 * K) * D && is_f32_2d(out_NHD, n, H * D));
  require(is_f32_2d(dout_NHD, n, H * D) && is_f32_2d(lse_NH, n, H) && is_f32_2d(dqkv_NQ, n, q));
  require(seg.offsets[seg.n_seqs] == n);
  if (n == 0) return;
  memset(dqkv_NQ.data, 0, tensor_bytes(dqkv_NQ));
#pragma omp parallel for num_threads(d->threads) collapse(2) \
    schedule(dynamic) if (n * q >= PARALLEL_MIN)
  for (int b = 0; b < seg.n_seqs; b++)
    for (int64_t kh = 0; kh < K; kh++) {
      int64_t start = seg.offsets[b];
      float *dbase = tensor_f32(dqkv_NQ) + start * q;
      const float *base = tensor_f32(qkv_NQ) + start * q;
      for (int64_t h = kh * (H / K); h < (kh + 1) * (H / K); h++) {
        BwdHead a = {.len = seg.offsets[b + 1] - start,
                     .q = q,
                     .D = D,
                     .hd = H * D,
                     .s = s,
                     .q_row = base + h * D,
                     .k = base + (H + kh) * D,
                     .v = base + (H + K + kh) * D,
                     .out = tensor_f32(out_NHD) + start * H * D + h * D,
                     .dout = tensor_f32(dout_NHD) + start * H * D + h * D,
                     .lse = tensor_f32(lse_NH) + start * H + h,
                     .lse_stride = H,
                     .dq = dbase + h * D,
                     .dk = dbase + (H + kh) * D,
                     .dv = dbase + (H + K + kh) * D};
        for (int64_t t = 0; t < a.len; t++) attention_bwd_row(&a, t);
      }
    }
}
