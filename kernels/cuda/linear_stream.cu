#include "kernels/cuda/linear_stream.h"

#include <algorithm>

#include "kernels/cuda/aligned.h"
#include "kernels/cuda/tensor_map.h"

/* Numbers of the smallest W: of less, blocks add up their parts for longer than they read. */
static constexpr int64_t FEWEST = 24 << 20, FEWEST_CODES = 16 << 20;

/* 64 rows of a unit of W in a copy, whose rows then lie as stream_pair has them. */
static CUtensorMap map_weights(const Linear &l, bool paired) {
  bool coded = l.codes.payload != nullptr;
  uint64_t rows = static_cast<uint64_t>(l.w_OK.dim[0]), k = static_cast<uint64_t>(l.w_OK.dim[1]);
  uint64_t row = coded ? k : 2 * k;
  uint32_t unit = coded ? CODES_K : STREAM_K;
  TensorMap m = {coded ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 CU_TENSOR_MAP_SWIZZLE_128B,
                 2,
                 {k, rows},
                 {row},
                 {unit, 64}};
  if (paired)
    m = {m.type, m.swizzle, 4, {k, 8, 2, rows / 16}, {2 * row, row, 16 * row}, {unit, 8, 2, 4}};
  return tensor_map(coded ? l.codes.payload : l.w_OK.data, m);
}

static CUtensorMap map_rows(Tensor x, int rows_of_copy) {
  uint64_t rows = static_cast<uint64_t>(x.dim[0]), k = static_cast<uint64_t>(x.dim[1]);
  TensorMap m = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 CU_TENSOR_MAP_SWIZZLE_128B,
                 2,
                 {k, rows},
                 {2 * k},
                 {STREAM_K, static_cast<uint32_t>(rows_of_copy)}};
  return tensor_map(x.data, m);
}

/* Parts of tiles that blocks share: zeros, as every product leaves them. */
static __device__ float4 stream_parts[2 * STREAM_BLOCKS * STREAM_MOST / 4 * STREAM_WORKERS];
static float4 *parts() {
  void *p;
  CUDA_CHECK(cudaGetSymbolAddress(&p, stream_parts));
  return static_cast<float4 *>(p);
}

bool linear_stream_takes(Device *d, const Linear &l, Tensor x) {
  int64_t n = l.w_OK.dim[0], k = l.w_OK.dim[1];
  bool coded = l.codes.payload != nullptr;
  if (coded && l.format.block % CODES_K != 0) return false;
  if (cuda_of(d)->arch != 90 || x.dtype != DT_BF16 || k % (coded ? 16 : 8) != 0) return false;
  return n * k >= (coded ? FEWEST_CODES : FEWEST) && n * k <= INT32_MAX / 4 * 64LL &&
         aligned(x.data) && aligned(coded ? l.codes.payload : l.w_OK.data);
}

void linear_stream(Device *d, const Linear &l, Tensor x, Tensor y_MO) {
  require(x.dim[0] <= STREAM_MOST && aligned(x.data));
  if (x.dim[0] == 0) return;
  StreamLaunch p = {};
  p.a.m = static_cast<int>(x.dim[0]);
  p.a.n = static_cast<int>(l.w_OK.dim[0]);
  p.a.k = static_cast<int>(l.w_OK.dim[1]);
  p.a.tiles = static_cast<int>(cuda_ceil(p.a.n, STREAM_TILE));
  bool coded = l.codes.payload != nullptr;
  p.a.chunks = static_cast<int>(cuda_ceil(p.a.k, coded ? CODES_K : STREAM_K));
  p.a.add = l.add;
  p.a.y_f32 = y_MO.dtype == DT_F32;
  p.a.paired = p.a.n % 16 == 0;
  p.a.bias = cuda_data<const bf16>(l.bias_O);
  p.a.y = y_MO.data;
  p.blocks = std::min({cuda_of(d)->sms, STREAM_BLOCKS, p.a.tiles * p.a.chunks});
  p.columns = p.a.m <= 8 ? 8 : p.a.m <= 16 ? 16 : p.a.m <= 32 ? 32 : 64;
  p.a.each = p.a.tiles * p.a.chunks / p.blocks;
  p.a.longer = p.a.tiles * p.a.chunks % p.blocks;
  p.w = map_weights(l, p.a.paired);
  p.x = map_rows(x, p.columns);
  p.a.parts = parts();
  if (!coded) {
    stream_plain(cuda_stream(d), p);
    return;
  }
  p.c = {l.codes.scales, static_cast<int>(wire_row_blocks(l.format, p.a.k)),
         static_cast<unsigned>(cuda_ceil(int64_t(1) << 31, l.format.block / CODES_K)),
         l.format.scale == DT_BF16};
  stream_codes(cuda_stream(d), l.format.kind, p);
}
