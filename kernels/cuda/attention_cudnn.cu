/* Attention by cuDNN: which plan serves a batch, and its run.
 *
 * Sequences of one length that is a multiple of 128 are a plain tensor. All others are packed:
 * cuDNN reads each one's length and place from device memory, and the plan is for their number and
 * longest length, both rounded up so that few plans serve all; sequences of no tokens fill it up.
 * They are taken longest first, and a batch of long and short ones is cut into parts of a plan
 * each.
 *
 * The backward keeps the gradient of scores in memory (attention_graph.cu says why), which grows
 * with the square of the length. A batch is cut also where that would be beyond CUT_BYTES, or less
 * on a small GPU. */
#include <stdlib.h>

#include "kernels/cuda/attention_cudnn.h"

enum { SHORTEST = 128 };
static const int64_t CUT_BYTES = int64_t(1) << 31;

/* What a call works on; forward leaves the gradients absent. */
struct AttnCall {
  Device *d;
  AttnShape s;
  Segments seg;
  Tensor qkv, out, lse, dout, dqkv;
};

/* Sequences that one plan serves: [first, first + count) of the list of lengths. */
struct AttnPart {
  int first, count;
  AttnGraphKey key;
};

/* To least * 1, 1.5 (from 2 on), 2, 3, 4, 6, 8, ... */
static int round_up_some(int x, int least) {
  int r = least;
  while (r < x) r *= 2;
  return r > 2 && r / 4 * 3 >= x && r / 4 * 3 >= least ? r / 4 * 3 : r;
}

static int seq_len(Segments seg, int b) { return seg.offsets[b + 1] - seg.offsets[b]; }

static AttnGraphKey key_of(const AttnCall &c, int count, int longest, bool packed) {
  AttnGraphKey k = {c.s.n_heads, c.s.n_kv_heads, c.s.head_dim, c.s.window,
                    count,       longest,        packed,       c.dqkv.data != nullptr};
  if (k.window >= longest) k.window = 0;
  if (!packed) return k;
  k.n_seqs = round_up_some(count, 1);
  k.len = round_up_some(longest, SHORTEST);
  return k;
}

static int64_t score_bytes(const AttnGraphKey &k) {
  int64_t len = k.len;
  return 2 * len * len * k.n_seqs * k.n_heads;
}

/* A run of its own for short sequences saves more than it costs from a factor of 4 in length on,
 * and when there are more than a few of them. */
static bool worth_cutting(int len, const AttnGraphKey &k, int rest) {
  return 4 * len <= k.len && rest > 8;
}

/* From the list's sequence `first` on, as many as fit. Lengths fall. */
static AttnPart next_part(const AttnCall &c, const int *lengths, int first, bool packed) {
  AttnPart part = {first, 0, {}};
  int longest = lengths[first] > 0 ? lengths[first] : 1;
  int64_t most = attention_of(c.d)->most_workspace / 4 * 3;
  if (most > CUT_BYTES) most = CUT_BYTES;
  while (first + part.count < c.seg.n_seqs) {
    int at = first + part.count;
    AttnGraphKey k = key_of(c, part.count + 1, longest, packed);
    if (part.count > 0 && packed && worth_cutting(lengths[at], k, c.seg.n_seqs - at)) break;
    if (part.count > 0 && k.backward && score_bytes(k) > most) break;
    part.key = k;
    part.count++;
  }
  return part;
}

static int longer_first(const void *a, const void *b) {
  int x = *static_cast<const int *>(a), y = *static_cast<const int *>(b);
  return (x < y) - (x > y);
}

static int *list_lengths(Segments seg) {
  int *lengths = static_cast<int *>(mem_alloc(static_cast<size_t>(seg.n_seqs), sizeof(int)));
  for (int b = 0; b < seg.n_seqs; b++) lengths[b] = seq_len(seg, b);
  qsort(lengths, static_cast<size_t>(seg.n_seqs), sizeof(int), longer_first);
  return lengths;
}

/* Whether every sequence has one length, and cuDNN needs no mask for its last tile. */
static bool is_plain(Segments seg) {
  for (int b = 1; b < seg.n_seqs; b++)
    if (seq_len(seg, b) != seq_len(seg, 0)) return false;
  return seg.offsets[0] == 0 && seq_len(seg, 0) > 0 && seq_len(seg, 0) % SHORTEST == 0;
}

/* ---- scratch ---- */

/* Lengths and places of a part's sequences, for the packed form. */
struct AttnPlaces {
  int32_t *len;
  int64_t *at_qkv, *at_out, *at_stats;
};
struct AttnScratch {
  AttnPlaces places;
  float *stats; /* forward: where the caller wants none; backward: by head, for the plain form */
  float *delta;
  void *workspace;
  size_t bytes;
};

/* Lays the parts out from `base` on (NULL: only to count the bytes). */
static AttnScratch lay_out(char *base, const AttnCall &c, const AttnGraphKey &k,
                           int64_t workspace) {
  AttnScratch x = {};
  auto take = [&](int64_t bytes) {
    void *p = base ? base + x.bytes : nullptr;
    x.bytes += static_cast<size_t>((bytes + 255) / 256 * 256);
    return p;
  };
  int64_t rows = static_cast<int64_t>(k.n_seqs) * k.n_heads * k.len, places = k.n_seqs + 1;
  if (k.packed) {
    x.places.len = static_cast<int32_t *>(take(4 * places));
    x.places.at_qkv = static_cast<int64_t *>(take(8 * places));
    x.places.at_out = static_cast<int64_t *>(take(8 * places));
    x.places.at_stats = static_cast<int64_t *>(take(8 * places));
  }
  int64_t stats = k.packed ? c.qkv.dim[0] * k.n_heads : rows; /* places count from the first row */
  x.stats = static_cast<float *>(take(4 * stats));
  if (k.backward) x.delta = static_cast<float *>(take(4 * rows));
  x.workspace = take(workspace);
  return x;
}

/* Sequences by falling length, those of one length in their order: [first, first + count) of that
 * list. Beyond them, up to `room`, sequences are empty. A thread for each sequence and each place.
 */
static __global__ void place_sequences(const int32_t *offsets, int n, int first, int count,
                                       int room, int64_t qkv_row, int64_t out_row, int64_t heads,
                                       AttnPlaces p) {
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), rank = -1, len = 0;
  int64_t at = offsets[n];
  if (i < n) {
    at = offsets[i];
    len = offsets[i + 1] - offsets[i];
    rank = 0;
    for (int j = 0, start = offsets[0]; j < n; j++) {
      int end = offsets[j + 1], other = end - start;
      rank += other > len || (other == len && j < i);
      start = end;
    }
  }
  auto put = [&](int slot, int64_t row, int length) {
    p.len[slot] = length;
    p.at_qkv[slot] = row * qkv_row;
    p.at_out[slot] = row * out_row;
    p.at_stats[slot] = row * heads;
  };
  if (rank >= first && rank < first + count) put(rank - first, at, len);
  if (i >= count && i <= room) put(i, offsets[n], 0);
}

/* to_BHT = from_NH, sequences of one length. Reads and writes in lines of 32 numbers. */
static __global__ void stats_by_head(const float *from, float *to, int heads, int len) {
  __shared__ float tile[32][33];
  int t0 = static_cast<int>(blockIdx.x) * 32, h0 = static_cast<int>(blockIdx.y) * 32;
  int64_t seq = blockIdx.z;
  int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  for (int j = y; j < 32; j += 8)
    if (h0 + x < heads) tile[j][x] = from[(seq * len + t0 + j) * heads + h0 + x];
  __syncthreads();
  for (int j = y; j < 32; j += 8)
    if (h0 + j < heads) to[(seq * heads + h0 + j) * len + t0 + x] = tile[x][j];
}

/* ---- runs ---- */

static char *at_row(Tensor t, int64_t row) {
  return static_cast<char *>(t.data) + row * t.dim[1] * static_cast<int64_t>(dtype_size(t.dtype));
}

/* Everything that a plan may ask for, by uid: absent where this one does not. */
struct AttnPointers {
  void *of[ATTN_UIDS];
};

static void point_at_heads(const AttnCall &c, Tensor rows, int64_t row, void **q, void **k,
                           void **v) {
  int64_t element = 2, D = c.s.head_dim, H = c.s.n_heads, K = c.s.n_kv_heads;
  *q = at_row(rows, row);
  *k = static_cast<char *>(*q) + element * H * D;
  *v = static_cast<char *>(*k) + element * K * D;
}

/* Packed, places count from the first row of all; else the part's own rows. */
static AttnPointers point(const AttnCall &c, const AttnPart &p, const AttnScratch &x) {
  AttnPointers at = {};
  bool backward = p.key.backward;
  int64_t row = p.key.packed ? 0 : c.seg.offsets[p.first];
  point_at_heads(c, c.qkv, row, &at.of[ATTN_Q], &at.of[ATTN_K], &at.of[ATTN_V]);
  at.of[ATTN_OUT] = at_row(c.out, row);
  at.of[ATTN_STATS] =
      c.lse.data && (p.key.packed || !backward) ? at_row(c.lse, row) : static_cast<void *>(x.stats);
  if (p.key.packed) {
    at.of[ATTN_LEN_Q] = at.of[ATTN_LEN_KV] = x.places.len;
    at.of[ATTN_AT_QKV] = x.places.at_qkv;
    at.of[ATTN_AT_OUT] = x.places.at_out;
    at.of[ATTN_AT_STATS] = x.places.at_stats;
  }
  if (backward) {
    at.of[ATTN_DOUT] = at_row(c.dout, row);
    point_at_heads(c, c.dqkv, row, &at.of[ATTN_DQ], &at.of[ATTN_DK], &at.of[ATTN_DV]);
    at.of[ATTN_DELTA] = x.delta;
  }
  return at;
}

static void prepare(const AttnCall &c, const AttnPart &p, const AttnScratch &x) {
  const AttnGraphKey &k = p.key;
  cudaStream_t stream = cuda_stream(c.d);
  if (k.packed) {
    int n = c.seg.n_seqs, threads = n > k.n_seqs + 1 ? n : k.n_seqs + 1;
    place_sequences<<<static_cast<unsigned>(cuda_ceil(threads, 128)), 128, 0, stream>>>(
        cuda_data<int32_t>(c.seg.device_offsets), n, p.first, p.count, k.n_seqs, c.qkv.dim[1],
        c.out.dim[1], k.n_heads, x.places);
    CUDA_LAUNCHED();
  } else if (k.backward) {
    dim3 grid(static_cast<unsigned>(k.len / 32), static_cast<unsigned>(cuda_ceil(k.n_heads, 32)),
              static_cast<unsigned>(k.n_seqs));
    const float *lse = cuda_data<float>(c.lse) + int64_t(c.seg.offsets[p.first]) * k.n_heads;
    stats_by_head<<<grid, dim3(32, 8), 0, stream>>>(lse, x.stats, k.n_heads, k.len);
    CUDA_LAUNCHED();
  }
}

static void run_part(const AttnCall &c, const AttnPart &p) {
  CudaAttention *a = attention_of(c.d);
  CudnnGraph *g = attention_plan(a, p.key)->graph;
  size_t bytes = lay_out(nullptr, c, p.key, g->workspace).bytes;
  AttnScratch x = lay_out(static_cast<char *>(cuda_scratch(c.d, bytes)), c, p.key, g->workspace);
  prepare(c, p, x);
  AttnPointers at = point(c, p, x);
  int64_t uids[ATTN_UIDS];
  void *data[ATTN_UIDS];
  int n = 0;
  for (int uid = 0; uid < ATTN_UIDS; uid++)
    if (at.of[uid]) {
      uids[n] = uid;
      data[n++] = at.of[uid];
    }
  g->scalar[0] = c.s.scale;
  cudnnStatus_t status = a->dnn.cudnnSetStream(a->handle, cuda_stream(c.d));
  if (status != CUDNN_STATUS_SUCCESS) die("cudnnSetStream: %s", a->dnn.cudnnGetErrorString(status));
  if (!graph_run(g, a->handle, n, uids, data, x.workspace))
    die("attention %s by cuDNN: %s", p.key.backward ? "backward" : "forward", g->error);
}

static bool have_plans(const AttnCall &c, const int *lengths, bool packed) {
  for (int b = 0; b < c.seg.n_seqs;) {
    AttnPart p = next_part(c, lengths, b, packed);
    if (!attention_plan(attention_of(c.d), p.key)) return false;
    b += p.count;
  }
  return true;
}

/* Every part has its plan before the first one runs. */
static bool run_call(const AttnCall &c) {
  if (!attention_of(c.d)->handle) return false;
  bool packed = !is_plain(c.seg);
  int *lengths = list_lengths(c.seg);
  bool able = have_plans(c, lengths, packed);
  for (int b = 0; able && b < c.seg.n_seqs;) {
    AttnPart p = next_part(c, lengths, b, packed);
    run_part(c, p);
    b += p.count;
  }
  free(lengths);
  return able;
}

bool cudnn_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                         Tensor lse_NH) {
  return run_call({d, s, seg, qkv_NQ, out_NHD, lse_NH, {}, {}});
}

bool cudnn_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                         Segments seg, AttnShape s, Tensor dqkv_NQ) {
  return run_call({d, s, seg, qkv_NQ, out_NHD, lse_NH, dout_NHD, dqkv_NQ});
}
