/* quant_wide: blocks of up to 1024 in registers: every number is read once and written once.
 *
 * LANES threads hold a block, K groups of eight each; blocks and rows are whole numbers of eights
 * and lie where four elements are read at once. A thread works on UNROLL blocks at a time, so that
 * enough reads are under way. Several sources are read at a time and added in order. */
#include "kernels/cuda/quant_codes.h"

template <int K>
__host__ __device__ constexpr int unroll() {
  return K == 1 ? 2 : 1;
}
template <int LANES, int K>
__host__ __device__ constexpr int chunk() { /* blocks */
  return QUANT_THREADS / LANES * unroll<K>();
}

/* One thread's share of one block. */
template <int LANES, int K>
struct Share {
  QuantPlace b;
  int64_t i; /* the block's number */
  int lane;
  Eight e[K];

  __device__ int first(int k) const { return 4 * (lane + LANES * k); }
  __device__ bool has(int k) const { return 2 * first(k) < b.n; }
};

/* ---- sources ---- */

/* Sources that are read at a time, so that what is read fits in registers. */
template <WireKind FROM, int K>
__host__ __device__ constexpr int together() {
  return FROM == WIRE_F32 ? (K == 4 ? 1 : 2) : K == 4 ? 2 : 4;
}

template <WireKind KIND, int LANES, int K>
__device__ inline void start_with_sink(Share<LANES, K> &s, const QuantPart &p) {
#pragma unroll
  for (int k = 0; k < K; k++) {
    if (!s.has(k)) continue;
    const char *at = p.to_payload + group_offset(KIND, s.b, s.first(k));
    s.e[k] = raw_decode<KIND>(raw_load<KIND>(at, group_apart(KIND, s.b)));
  }
}

template <WireKind FROM, int LANES, int K>
struct Source {
  Raw<FROM> raw[K];
  float scale;
};

template <WireKind FROM, int LANES, int K>
__device__ inline void source_load(Source<FROM, LANES, K> &in, const Share<LANES, K> &s,
                                   const QuantJob &job, const QuantPart &p, int r) {
  in.scale = 1;
  if (has_blocks(FROM) && s.b.n > 0)
    in.scale = scale_get(job.from_scale, p.from_scales + r * p.stride, s.i);
#pragma unroll
  for (int k = 0; k < K; k++) {
    const char *at = p.from_payload + r * p.stride + group_offset(FROM, s.b, s.first(k));
    if (s.has(k)) in.raw[k] = raw_load<FROM>(at, group_apart(FROM, s.b));
  }
}

template <WireKind FROM, int LANES, int K>
__device__ inline void source_add(const Source<FROM, LANES, K> &in, Share<LANES, K> &s) {
#pragma unroll
  for (int k = 0; k < K; k++) {
    Eight e = raw_decode<FROM>(in.raw[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if constexpr (has_blocks(FROM))
        s.e[k].v[i] = __fmaf_rn(e.v[i], in.scale, s.e[k].v[i]);
      else
        s.e[k].v[i] = __fadd_rn(s.e[k].v[i], e.v[i]);
    }
  }
}

/* N sources from r on, all read before the first is added. */
template <WireKind FROM, int N, int LANES, int K>
__device__ inline void sources_add(Share<LANES, K> *s, const QuantJob &job, const QuantPart &p,
                                   int r) {
  Source<FROM, LANES, K> in[N][unroll<K>()];
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int u = 0; u < unroll<K>(); u++) source_load(in[j][u], s[u], job, p, r + j);
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int u = 0; u < unroll<K>(); u++) source_add(in[j][u], s[u]);
}

/* ---- the sink ---- */

template <int LANES, int K>
__device__ inline float share_scale(const Share<LANES, K> &s, const QuantJob &job) {
  float most = 0;
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (s.has(k)) most = largest(most, s.e[k].v[i]);
  uint32_t bits = __float_as_uint(most);
  if constexpr (LANES == 32) {
    bits = __reduce_max_sync(0xffffffffu, bits);
  } else {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
      uint32_t other = __shfl_xor_sync(0xffffffffu, bits, o);
      bits = other > bits ? other : bits;
    }
  }
  return quant_scale(job.to, job.to_scale, bits);
}

/* Errors are read before and written behind what is sent; `e` is what is sent. */
__device__ inline Raw<WIRE_BF16> error_load(const QuantPart &p, const QuantPlace &b, int i) {
  return raw_load<WIRE_BF16>(reinterpret_cast<const char *>(p.error + b.at + i), b.n);
}

template <WireKind TO>
__device__ inline void error_store(const QuantPart &p, const QuantPlace &b, int i, const Eight &e,
                                   const Raw<TO> &codes, float scale, const Raw<WIRE_BF16> &old) {
  Eight got = raw_decode<TO>(codes), error = raw_decode<WIRE_BF16>(old);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float value = has_blocks(TO) ? __fmul_rn(got.v[j], scale) : got.v[j];
    error.v[j] = isnan(scale) ? 0.0f : error_left(e.v[j], value, error.v[j], p.keep);
  }
  raw_store<WIRE_BF16>(reinterpret_cast<char *>(p.error + b.at + i), b.n,
                       raw_encode<WIRE_BF16>(error, 1));
}

template <WireKind TO, int LANES, int K>
__device__ inline void share_store(Share<LANES, K> &s, const QuantJob &job, const QuantPart &p) {
  float scale = 1, inverse = 1;
  Raw<WIRE_BF16> old[K];
  if (p.error) {
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (!s.has(k)) continue;
      old[k] = error_load(p, s.b, s.first(k));
      Eight e = raw_decode<WIRE_BF16>(old[k]);
#pragma unroll
      for (int i = 0; i < 8; i++) s.e[k].v[i] = __fadd_rn(s.e[k].v[i], e.v[i]);
    }
  }
  if constexpr (has_blocks(TO)) {
    scale = share_scale(s, job);
    inverse = quant_inverse(scale);
    if (s.lane == 0 && s.b.n > 0) scale_put(job.to_scale, p.to_scales, s.i, scale);
  }
#pragma unroll
  for (int k = 0; k < K; k++) {
    if (!s.has(k)) continue;
    Eight sent = s.e[k];
#pragma unroll
    for (int i = 0; i < 8; i++) sent.v[i] = isnan(scale) ? 0.0f : sent.v[i];
    Raw<TO> codes = raw_encode<TO>(sent, inverse);
    char *at = p.to_payload + group_offset(TO, s.b, s.first(k));
    raw_store<TO>(at, group_apart(TO, s.b), codes);
    if (p.error) error_store<TO>(p, s.b, s.first(k), sent, codes, scale, old[k]);
  }
}

/* Calls f with the kind of the sink as a constant. */
template <WireKind KIND>
struct Kind {
  static constexpr WireKind value = KIND;
};
template <class F>
__device__ inline void by_kind(WireKind kind, F f) {
  switch (kind) {
    case WIRE_F32:
      return f(Kind<WIRE_F32>());
    case WIRE_BF16:
      return f(Kind<WIRE_BF16>());
    case WIRE_INT8:
      return f(Kind<WIRE_INT8>());
    case WIRE_INT4:
      return f(Kind<WIRE_INT4>());
    case WIRE_FP8:
      return f(Kind<WIRE_FP8>());
  }
}

/* ---- kernel ---- */

template <WireKind FROM, int LANES, int K>
__global__ void __launch_bounds__(QUANT_THREADS) wide_kernel(const __grid_constant__ QuantJob job) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t first = (blockIdx.x - p.first_chunk) * chunk<LANES, K>() + threadIdx.x / LANES;
  Share<LANES, K> s[unroll<K>()];
#pragma unroll
  for (int u = 0; u < unroll<K>(); u++) {
    s[u].i = first + u * (QUANT_THREADS / LANES);
    s[u].b = quant_place(p, job.block, s[u].i);
    s[u].lane = threadIdx.x % LANES;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
      for (int i = 0; i < 8; i++) s[u].e[k].v[i] = -0.0f; /* plus x is x, zeros' signs too */
    if (job.add && job.to == WIRE_F32) start_with_sink<WIRE_F32>(s[u], p);
    if (job.add && job.to == WIRE_BF16) start_with_sink<WIRE_BF16>(s[u], p);
  }
  int r = 0;
  constexpr int N = together<FROM, K>();
  for (; r + N <= p.n; r += N) sources_add<FROM, N>(s, job, p, r);
  for (; r < p.n; r++) sources_add<FROM, 1>(s, job, p, r);
  by_kind(job.to, [&](auto kind) {
#pragma unroll
    for (int u = 0; u < unroll<K>(); u++) share_store<kind.value>(s[u], job, p);
  });
}

/* ---- launch ---- */

bool quant_wide_takes(const QuantJob &job, const QuantPart &p) {
  static const int bytes[] = {16, 8, 4, 4, 4}; /* of four elements (int4: of eight) */
  if (job.block > 1024 || job.block % 8 != 0 || p.width % 8 != 0) return false;
  return quant_alignment(p.from_payload, p.stride) >= bytes[job.from] &&
         quant_alignment(p.to_payload, 0) >= bytes[job.to] && quant_alignment(p.error, 0) >= 8;
}

/* Calls f with the shape of the threads of a block. */
template <int L, int KK>
struct Shape {
  static constexpr int LANES = L, K = KK;
};
template <class F>
static void by_block(int block, F f) {
  if (block <= 128)
    f(Shape<16, 1>());
  else if (block <= 256)
    f(Shape<32, 1>());
  else if (block <= 512)
    f(Shape<32, 2>());
  else
    f(Shape<32, 4>());
}

int64_t quant_wide_chunks(const QuantJob &job, const QuantPart &p) {
  int64_t chunks = 0;
  by_block(job.block, [&](auto s) { chunks = cuda_ceil(p.blocks, chunk<s.LANES, s.K>()); });
  return chunks;
}

template <WireKind FROM>
static void launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  by_block(job.block, [&](auto s) {
    wide_kernel<FROM, s.LANES, s.K>
        <<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job);
  });
  CUDA_LAUNCHED();
}

void quant_wide_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  switch (job.from) {
    case WIRE_F32:
      return launch<WIRE_F32>(stream, job, chunks);
    case WIRE_BF16:
      return launch<WIRE_BF16>(stream, job, chunks);
    case WIRE_INT8:
      return launch<WIRE_INT8>(stream, job, chunks);
    case WIRE_INT4:
      return launch<WIRE_INT4>(stream, job, chunks);
    case WIRE_FP8:
      return launch<WIRE_FP8>(stream, job, chunks);
  }
}
