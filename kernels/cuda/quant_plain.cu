/* quant_plain: between formats without blocks, float32 and bfloat16: sums and conversions of single
 * elements. */
#include "kernels/cuda/quant_codes.h"

enum { CHUNK = 32 * QUANT_THREADS };

/* What a thread reads at once: 16 bytes at most, and as many elements on both sides. */
template <int N>
struct Some {
  float v[N];
};
template <WireKind FROM, WireKind TO>
__device__ constexpr int at_once() {
  return FROM == WIRE_BF16 && TO == WIRE_BF16 ? 8 : 4;
}

template <WireKind KIND>
__device__ inline float one_load(const char *p, int64_t i) {
  if constexpr (KIND == WIRE_F32) return reinterpret_cast<const float *>(p)[i];
  return float_of_bf16(reinterpret_cast<const uint16_t *>(p)[i]);
}
template <WireKind KIND>
__device__ inline void one_store(char *p, int64_t i, float x) {
  if constexpr (KIND == WIRE_F32)
    reinterpret_cast<float *>(p)[i] = x;
  else
    reinterpret_cast<uint16_t *>(p)[i] = static_cast<uint16_t>(bf16_of_float(x));
}

template <int N>
struct __align__(2 * N) Halves { /* BF16 */
  uint32_t pair[N / 2];
};

/* As they lie in memory: BF16 waits in half of the registers that its floats would take. */
template <WireKind KIND, int N>
using Words = std::conditional_t<KIND == WIRE_F32, float4, Halves<N>>;

template <int N>
__device__ inline Some<N> some_of(const float4 &f) {
  return {{f.x, f.y, f.z, f.w}};
}
template <int N>
__device__ inline Some<N> some_of(const Halves<N> &h) {
  Some<N> x;
#pragma unroll
  for (int k = 0; k < N; k++)
    x.v[k] = __uint_as_float(k % 2 ? h.pair[k / 2] & 0xffff0000u : h.pair[k / 2] << 16);
  return x;
}
template <WireKind KIND, int N>
__device__ inline void some_store(char *p, int64_t i, const Some<N> &x) {
  if constexpr (KIND == WIRE_F32) {
    *reinterpret_cast<float4 *>(p + 4 * i) = {x.v[0], x.v[1], x.v[2], x.v[3]};
  } else {
    Halves<N> h;
#pragma unroll
    for (int k = 0; k < N; k += 2)
      h.pair[k / 2] = bf16_of_float(x.v[k]) | bf16_of_float(x.v[k + 1]) << 16;
    *reinterpret_cast<Halves<N> *>(p + 2 * i) = h;
  }
}

/* What element x becomes on the wire. */
template <WireKind TO>
__device__ inline float arrives(float x) {
  return TO == WIRE_F32 ? x : float_of_bf16(bf16_of_float(x));
}

/* ---- any alignment: one element at a time ---- */

template <WireKind FROM, WireKind TO>
__device__ inline void one_element(const QuantJob &job, const QuantPart &p, int64_t i) {
  float x = job.add ? one_load<TO>(p.to_payload, i) : one_load<FROM>(p.from_payload, i);
  for (int r = job.add ? 0 : 1; r < p.n; r++)
    x = __fadd_rn(x, one_load<FROM>(p.from_payload + r * p.stride, i));
  if (p.error) {
    float e = float_of_bf16(p.error[i]);
    x = __fadd_rn(x, e);
    float left = error_left(x, arrives<TO>(x), e, p.keep);
    p.error[i] = static_cast<uint16_t>(bf16_of_float(left));
  }
  one_store<TO>(p.to_payload, i, x);
}

template <WireKind FROM, WireKind TO>
__global__ void __launch_bounds__(QUANT_THREADS) one_kernel(const __grid_constant__ QuantJob job) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t first = (blockIdx.x - p.first_chunk) * CHUNK;
  for (int j = threadIdx.x; j < CHUNK && first + j < p.count; j += QUANT_THREADS)
    one_element<FROM, TO>(job, p, first + j);
}

/* ---- aligned, no errors ---- */

template <WireKind KIND, int N, int UNROLL>
__device__ inline void all_load(Words<KIND, N> *x, const char *payload, int64_t first,
                                int64_t count) {
  constexpr int bytes = KIND == WIRE_F32 ? 4 : 2;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int64_t i = first + N * QUANT_THREADS * u;
    if (i + N <= count) x[u] = *reinterpret_cast<const Words<KIND, N> *>(payload + bytes * i);
  }
}

template <WireKind KIND, int N, int UNROLL>
__device__ inline void all_start(Some<N> *x, const char *payload, int64_t first, int64_t count) {
  Words<KIND, N> w[UNROLL];
  all_load<KIND, N, UNROLL>(w, payload, first, count);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) x[u] = some_of<N>(w[u]);
}

/* SOURCES from r on, all read before the first is added. */
template <WireKind KIND, int N, int UNROLL, int SOURCES>
__device__ inline void all_add(Some<N> *x, const QuantPart &p, int r, int64_t first) {
  Words<KIND, N> w[SOURCES][UNROLL];
#pragma unroll
  for (int j = 0; j < SOURCES; j++)
    all_load<KIND, N, UNROLL>(w[j], p.from_payload + (r + j) * p.stride, first, p.count);
#pragma unroll
  for (int j = 0; j < SOURCES; j++)
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      Some<N> y = some_of<N>(w[j][u]);
#pragma unroll
      for (int k = 0; k < N; k++) x[u].v[k] = __fadd_rn(x[u].v[k], y.v[k]);
    }
}

/* The error joins what is sent, and keeps what does not arrive of it. */
template <WireKind TO, int N>
__device__ inline Some<N> some_fed(Some<N> *x, const Halves<N> &old, float keep) {
  Some<N> e = some_of<N>(old);
#pragma unroll
  for (int k = 0; k < N; k++) {
    x->v[k] = __fadd_rn(x->v[k], e.v[k]);
    e.v[k] = error_left(x->v[k], arrives<TO>(x->v[k]), e.v[k], keep);
  }
  return e;
}

/* FED: some parts have errors. */
template <WireKind FROM, WireKind TO, bool FED>
__global__ void __launch_bounds__(QUANT_THREADS) some_kernel(const __grid_constant__ QuantJob job) {
  constexpr int N = at_once<FROM, TO>(), UNROLL = CHUNK / QUANT_THREADS / N;
  constexpr int SOURCES = UNROLL < 8 ? 2 : 1; /* eight reads at a time keep memory busy */
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t first = (blockIdx.x - p.first_chunk) * CHUNK + N * threadIdx.x;
  Some<N> x[UNROLL];
  Halves<N> old[UNROLL];
  char *error = reinterpret_cast<char *>(p.error);
  if (FED && error) all_load<WIRE_BF16, N, UNROLL>(old, error, first, p.count);
  if (job.add)
    all_start<TO, N, UNROLL>(x, p.to_payload, first, p.count);
  else
    all_start<FROM, N, UNROLL>(x, p.from_payload, first, p.count);
  int r = job.add ? 0 : 1;
  for (; r + SOURCES <= p.n; r += SOURCES) all_add<FROM, N, UNROLL, SOURCES>(x, p, r, first);
  for (; SOURCES > 1 && r < p.n; r++) all_add<FROM, N, UNROLL, 1>(x, p, r, first);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int64_t i = first + N * QUANT_THREADS * u;
    if (i + N > p.count) { /* the last few elements */
      for (; i < p.count; i++) one_element<FROM, TO>(job, p, i);
      continue;
    }
    if (FED && error) some_store<WIRE_BF16, N>(error, i, some_fed<TO, N>(&x[u], old[u], p.keep));
    some_store<TO, N>(p.to_payload, i, x[u]);
  }
}

/* ---- launch ---- */

int64_t quant_plain_chunks(const QuantPart &p) { return cuda_ceil(p.count, CHUNK); }

static bool is_aligned(const QuantJob &job, const QuantPart &p) {
  const bool halves = job.from == WIRE_BF16 && job.to == WIRE_BF16;
  const int bytes[] = {16, halves ? 16 : 8};
  return quant_alignment(p.from_payload, p.stride) >= bytes[job.from] &&
         quant_alignment(p.to_payload, 0) >= bytes[job.to] &&
         quant_alignment(p.error, 0) >= bytes[WIRE_BF16];
}

template <WireKind FROM, WireKind TO>
static void launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  bool aligned = true, fed = false;
  for (int i = 0; i < job.n; i++) {
    aligned = aligned && is_aligned(job, job.part[i]);
    fed = fed || job.part[i].error;
  }
  auto *kernel = !aligned ? one_kernel<FROM, TO>
                 : fed    ? some_kernel<FROM, TO, true>
                          : some_kernel<FROM, TO, false>;
  kernel<<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job);
  CUDA_LAUNCHED();
}

void quant_plain_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  bool from_f32 = job.from == WIRE_F32, to_f32 = job.to == WIRE_F32;
  if (from_f32 && to_f32)
    launch<WIRE_F32, WIRE_F32>(stream, job, chunks);
  else if (from_f32)
    launch<WIRE_F32, WIRE_BF16>(stream, job, chunks);
  else if (to_f32)
    launch<WIRE_BF16, WIRE_F32>(stream, job, chunks);
  else
    launch<WIRE_BF16, WIRE_BF16>(stream, job, chunks);
}
