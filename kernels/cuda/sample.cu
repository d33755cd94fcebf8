/* Sampling one token per row. The CPU's algorithm (cpu/sample.c): what a filter keeps is a Cut,
 * found by bisecting the weights' bit patterns; nothing is sorted. Weights are the CPU's to the
 * bit, sums of them are doubles in a fixed order.
 *
 * A row belongs to a cluster of blocks, whose number follows from V alone (one where the card has
 * no clusters), and each thread keeps its weights in registers: packs of four ids, pack i of a warp
 * being TILE ids in a row. A pass over the row then costs little more than adding up across the
 * cluster. Only rows beyond what registers hold keep their weights in scratch. */
#include "kernels/cuda/chain.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sample_filter.h"

namespace {

/* Two lanes have a byte's ids between them. */
template <int PACKS>
__device__ inline void write_kept(Row<PACKS> &r, int64_t b, int64_t batch) {
  int step = r.a.step ? *r.a.step : 0;
  int64_t width = (r.a.v + 7) / 8;
  if (step < 0 || step >= r.a.steps) __trap();
  uint8_t *bits = r.a.kept + (step * batch + b) * width;
  each_pack(r, [&](int i, float4 &w) {
    int id = r.id(i);
    unsigned four = (w.x > 0) | (w.y > 0) << 1 | (w.z > 0) << 2 | (w.w > 0) << 3;
    four |= __shfl_down_sync(0xffffffffu, four, 1) << 4;
    if (r.lane % 2 == 0 && id < static_cast<int>(r.a.v)) bits[id / 8] = static_cast<uint8_t>(four);
  });
}

template <int PACKS>
__device__ inline void find_seen(Row<PACKS> &r, int64_t b) {
  int slot = r.a.seen ? r.a.slot[b] : -1;
  if (slot < 0) return;
  r.newest = r.a.newest[b];
  if (slot >= r.a.slots || r.newest < 0 || r.newest >= r.a.v) __trap();
  r.seen = r.a.seen + static_cast<int64_t>(slot) * r.a.seen_width;
}

template <int PACKS>
__global__ __launch_bounds__(THREADS,
                             PACKS == 4 ? 2
                                        : 1) void sample_kernel(const __grid_constant__ Sample a) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ Shared shared;
  int rank = cluster_rank(a.cluster), thread = static_cast<int>(threadIdx.x);
  int64_t b = blockIdx.x / static_cast<unsigned>(a.cluster);
  Row<PACKS> r = {.a = a,
                  .logits = a.logits + b * a.v,
                  .seen = nullptr,
                  .newest = 0,
                  .shared = &shared,
                  .cum = reinterpret_cast<double *>(dynamic),
                  .base = 0,
                  .of_rank = 0,
                  .rank = rank,
                  .lane = thread % 32,
                  .warp = thread / 32,
                  .turn = 0,
                  .memory = nullptr,
                  .pack = {}};
  if (PACKS == 0)
    r.memory = a.weights + static_cast<int64_t>(blockIdx.x) * a.packs * THREADS + thread;
  open_exchange(a, &shared);
  wait_for_kernel_before();
  next_kernel_may_start();
  find_seen(r, b);
  float largest, u = a.p.greedy ? 0 : a.u[b];
  int32_t token = id_of(read_row(r, &largest));
  auto weight = [](float w) { return static_cast<double>(w); };
  float best = logit_of_id(r, token), max = a.p.greedy ? largest : best * a.inv_temp;
  fill_weights(r, max, a.p.greedy ? nullptr : a.banned);
  if (!a.p.greedy && (a.p.top_k > 0 || a.p.top_p < 1 || a.p.min_p > 0))
    filter_weights(r, exp_f32(fmaf(best, a.inv_temp, -max)));
  if (a.kept) write_kept(r, b, gridDim.x / static_cast<unsigned>(a.cluster));
  double sum = add_up(r, weight);
  if (!a.p.greedy) {
    int32_t drawn = place_of(r, static_cast<double>(u) * sum, weight);
    if (drawn >= 0) token = drawn; /* else weights are NaN */
  }
  if (rank != 0 || thread != 0) return;
  float x = logit_of_id(r, token);
  if (r.seen)
    r.seen[r.newest / 8] |= static_cast<uint8_t>(1u << r.newest % 8); /* all have read it */
  double z = a.p.greedy ? static_cast<double>(x) - static_cast<double>(max)
                        : static_cast<double>(fmaf(x, a.inv_temp, -max));
  a.token[b] = token;
  a.logprob[b] = static_cast<float>(z - log(sum));
}

template <int PACKS>
void launch(cudaStream_t stream, const Sample &a, int64_t batch) {
  chain_launch(stream, sample_kernel<PACKS>, dim3(static_cast<unsigned>(batch * a.cluster)),
               THREADS, sizeof(double) * WARPS * static_cast<size_t>(a.packs), a.cluster, a);
}

bool is_row(Tensor t, DType type, int64_t n) {
  return t.dtype == type && t.ndim == 1 && t.dim[0] == n;
}

/* Enough blocks for four packs to a thread. */
void cut_row(Sample *a, int arch) {
  a->cluster = 1;
  while (arch >= 90 && a->cluster < MAX_CLUSTER && a->cluster * 4 * PACK_IDS < a->v)
    a->cluster *= 2;
  a->packs = static_cast<int>(cuda_ceil(a->v, a->cluster * PACK_IDS));
}

void give_seen(Sample *a, SeenTokens s, int64_t batch) {
  Tensor bits = s.bits_SW;
  require(bits.dtype == DT_U8 && bits.ndim == 2 && bits.dim[1] == (a->v + 7) / 8);
  require(is_row(s.slot_B, DT_I32, batch) && is_row(s.newest_B, DT_I32, batch));
  require(bits.dim[0] <= INT32_MAX);
  a->seen = cuda_data<uint8_t>(bits);
  a->seen_width = static_cast<int>(bits.dim[1]);
  a->slots = static_cast<int>(bits.dim[0]);
  a->slot = cuda_data<const int32_t>(s.slot_B);
  a->newest = cuda_data<const int32_t>(s.newest_B);
}

void give_kept(Sample *a, KeptTokens k, int64_t batch) {
  Tensor bits = k.bits_TBW;
  require(!a->p.greedy && bits.dtype == DT_U8 && bits.ndim == 3 && bits.dim[1] == batch);
  require(bits.dim[2] == (a->v + 7) / 8 && bits.dim[0] <= INT32_MAX);
  a->kept = cuda_data<uint8_t>(bits);
  a->step = cuda_data<const int32_t>(k.step_1);
  a->steps = static_cast<int>(bits.dim[0]);
}

/* A thread has the eight ids of a byte. */
__global__ void keep_only_kernel(int64_t v, int64_t bytes, const uint8_t *bits, float *logits) {
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  int64_t width = (v + 7) / 8, row = i / width, first = i % width * 8;
  if (i >= bytes) return;
  unsigned byte = bits[i];
  float *x = logits + row * v + first;
  for (int e = 0; e < 8; e++)
    if (first + e < v && !(byte >> e & 1)) x[e] = -INFINITY;
}

}  // namespace

void cuda_keep_only(Device *d, Tensor bits_RW, Tensor logits_RV) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1], bytes = r * ((v + 7) / 8);
  require(logits_RV.dtype == DT_F32 && logits_RV.ndim == 2 && bits_RW.dtype == DT_U8);
  require(bits_RW.ndim == 2 && bits_RW.dim[0] == r && tensor_numel(bits_RW) == bytes);
  if (bytes == 0) return;
  keep_only_kernel<<<static_cast<unsigned>(cuda_ceil(bytes, 256)), 256, 0, cuda_stream(d)>>>(
      v, bytes, cuda_data<const uint8_t>(bits_RW), cuda_data<float>(logits_RV));
  CUDA_LAUNCHED();
}

void cuda_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                 SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B) {
  int64_t batch = logits_BV.dim[0], v = logits_BV.dim[1];
  require(logits_BV.dtype == DT_F32 && logits_BV.ndim == 2 && is_row(token_B, DT_I32, batch));
  require(is_row(logprob_B, DT_F32, batch));
  require(p.greedy || (is_row(u_B, DT_F32, batch) && p.temperature > 0 && p.top_p > 0));
  require(p.min_p >= 0 && p.min_p <= 1 && p.repetition_penalty >= 0);
  require(!banned_V.data || (banned_V.dtype == DT_U8 && tensor_numel(banned_V) == v));
  require(v > 0 && v <= INT32_MAX - MAX_PACKS * PACK_IDS);
  if (batch == 0) return;
  Sample a = {};
  a.p = p;
  a.inv_temp = p.greedy ? 1 : 1 / p.temperature;
  a.v = v;
  cut_row(&a, cuda_of(d)->arch);
  a.aligned = v % 4 == 0 && reinterpret_cast<uintptr_t>(logits_BV.data) % 16 == 0;
  a.logits = cuda_data<const float>(logits_BV);
  a.u = cuda_data<const float>(u_B);
  a.banned = cuda_data<const uint8_t>(banned_V);
  if (sample_penalizes(p)) give_seen(&a, seen, batch);
  if (kept.bits_TBW.data) give_kept(&a, kept, batch);
  a.token = cuda_data<int32_t>(token_B);
  a.logprob = cuda_data<float>(logprob_B);
  if (a.packs > MAX_PACKS)
    die("sampling takes up to %d token ids here, found %lld", MAX_PACKS * PACK_IDS * a.cluster,
        static_cast<long long>(v));
  if (a.packs <= 4) {
    launch<4>(cuda_stream(d), a, batch);
  } else if (a.packs <= 8) {
    launch<8>(cuda_stream(d), a, batch);
  } else if (a.packs <= 16) {
    launch<16>(cuda_stream(d), a, batch);
  } else {
    size_t packs = static_cast<size_t>(batch * a.cluster * a.packs) * THREADS;
    a.weights = static_cast<float4 *>(cuda_scratch(d, sizeof(float4) * packs));
    launch<0>(cuda_stream(d), a, batch);
  }
}
