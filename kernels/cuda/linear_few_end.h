/* What becomes of the sums of linear_few.cu: each block of a cluster sends the others their
 * columns, adds up its own in order of k, and does with them what the product's Linear says. */
#ifndef KERNELS_CUDA_LINEAR_FEW_END_H
#define KERNELS_CUDA_LINEAR_FEW_END_H

#include "kernels/cuda/cluster.h"
#include "kernels/cuda/linear_weights.h"

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int COLUMNS = 16 * WARPS, PACKS = COLUMNS / 4; /* of a cluster; packs of four columns */
constexpr int PART = COLUMNS + 4;                        /* floats of a row of sums */
constexpr int MAX_CLUSTER = 16;

struct Few {
  const bf16 *x, *norm, *bias;
  Weights w;
  void *y;
  int m, share, cluster; /* share: of k, of a block */
  int own;               /* 2^own packs of a row are a block's */
  float eps;
  bool add, y_f32, early; /* early: the kernel behind may start before this one waits */
  bool packed;            /* four columns of y lie on their bytes, and so does the bias */
};

/* What comes to a block: of its packs the sums of all, [rank][row][pack], and squares [rank][row].
 */
struct Mail {
  uint64_t *all; /* a barrier */
  float *squares;
  float4 *sums;
};

#if __CUDA_ARCH__ >= 900

template <Front FRONT>
__device__ inline void open_mail(const Few &a, const Mail &mail) {
  if (a.cluster == 1) return;
  int squares = FRONT == FRONT_RMSNORM ? a.m * a.cluster : 0;
  cluster_open(mail.all, 1, static_cast<int>(sizeof(float)) * (a.m * COLUMNS + squares));
}

/* From a block's sums [row][PART] and squares, which lie `apart`. What a block alone has it needs
 * not send: all its threads call this, and meet behind it. */
template <Front FRONT>
__device__ inline void send_sums(const Few &a, int rank, const float *part, const float *squares,
                                 int apart, const Mail &mail) {
  int thread = static_cast<int>(threadIdx.x), own = a.own;
  for (int i = thread; i < a.m * PACKS; i += THREADS) {
    int row = i / PACKS, pack = i % PACKS;
    float4 sum = *reinterpret_cast<const float4 *>(part + row * PART + 4 * pack);
    float4 *to = mail.sums + ((rank * a.m + row) << own) + (pack & ((1 << own) - 1));
    if (a.cluster == 1)
      *to = sum;
    else
      cluster_send(cluster_at(to, pack >> own), cluster_at(mail.all, pack >> own), sum);
  }
  for (int i = thread; FRONT == FRONT_RMSNORM && i < a.m * a.cluster; i += THREADS) {
    int row = i % a.m, block = i / a.m;
    float *to = mail.squares + rank * a.m + row;
    if (a.cluster == 1)
      *to = squares[row * apart];
    else
      cluster_send(cluster_at(to, block), cluster_at(mail.all, block), squares[row * apart]);
  }
  if (a.cluster == 1) __syncthreads();
}

/* Four numbers of a row, `n` of which exist. */
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T e[4];
};
template <class T>
__device__ inline float4 four_load(const T *p, int n, bool packed) {
  Four<T> x = {};
  if (packed) {
    x = *reinterpret_cast<const Four<T> *>(p);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < n) x.e[i] = p[i];
  }
  return make_float4(to_float(x.e[0]), to_float(x.e[1]), to_float(x.e[2]), to_float(x.e[3]));
}
template <class T>
__device__ inline void four_store(T *p, int n, bool packed, float4 v) {
  Four<T> x = {{from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z), from_float<T>(v.w)}};
  if (packed) {
    *reinterpret_cast<Four<T> *>(p) = x;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < n) p[i] = x.e[i];
}
__device__ inline float4 add_four(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ inline void mail_is_open(const Few &a) {
  if (a.cluster > 1) cluster_meet();
}

/* Four columns of a row of y. What they are added to comes while sums are on the way. */
template <Front FRONT>
__device__ inline void finish_pack(const Few &a, const Mail &mail, int row, int pack, int column) {
  int n = a.w.n - column;
  int64_t at = static_cast<int64_t>(row) * a.w.n + column;
  float *wide = static_cast<float *>(a.y) + at;
  bf16 *narrow = static_cast<bf16 *>(a.y) + at;
  float4 old = {}, bias = {}, sum = {};
  if (a.bias && n > 0) bias = four_load(a.bias + column, n, a.packed);
  if (a.add && n > 0) old = a.y_f32 ? four_load(wide, n, a.packed) : four_load(narrow, n, a.packed);
  if (a.cluster > 1) barrier_wait(shared_at(mail.all), 0);
  float square = 0;
#pragma unroll 8
  for (int r = 0; r < a.cluster; r++) {
    sum = add_four(sum, mail.sums[((r * a.m + row) << a.own) + pack]);
    if (FRONT == FRONT_RMSNORM) square += mail.squares[r * a.m + row];
  }
  float scale = FRONT == FRONT_RMSNORM ? rsqrtf(square / static_cast<float>(a.w.k) + a.eps) : 1;
  sum = make_float4(scale * sum.x, scale * sum.y, scale * sum.z, scale * sum.w);
  if (a.bias) sum = add_four(sum, bias);
  if (a.add) sum = add_four(sum, old);
  if (n <= 0) return;
  if (a.y_f32)
    four_store(wide, n, a.packed, sum);
  else
    four_store(narrow, n, a.packed, sum);
}

/* All that come to this block: it may leave when they have come, not before. */
template <Front FRONT>
__device__ inline void finish_sums(const Few &a, int rank, const Mail &mail, int first_column) {
  int packs = 1 << a.own;
  for (int i = static_cast<int>(threadIdx.x); i < a.m * packs; i += THREADS) {
    int pack = i & (packs - 1);
    finish_pack<FRONT>(a, mail, i >> a.own, pack, first_column + 4 * (rank * packs + pack));
  }
}

#endif

}  // namespace

#endif
