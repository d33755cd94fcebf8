#include "kernels/cuda/linear_stream.h"

#include <algorithm>

#include "kernels/cuda/tensor_map.h"

/* Smaller W are read in less time than blocks take to add up their parts: on an H200 about 8 us, in
 * which 16 million numbers of BF16 are read. */
static constexpr int64_t FEWEST = 24 << 20;

/* 64 rows by 64 numbers of W in a copy, whose rows then lie as stream_pair has them. */
static CUtensorMap map_weights(const Linear &l, bool paired) {
  bool coded = l.codes.payload != nullptr;
  uint64_t rows = static_cast<uint64_t>(l.w_OK.dim[0]), k = static_cast<uint64_t>(l.w_OK.dim[1]);
  uint64_t row = coded ? k : 2 * k;
  TensorMap m = {coded ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 coded ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                 2,
                 {k, rows},
                 {row},
                 {STREAM_K, 64}};
  if (paired)
    m = {m.type, m.swizzle, 4, {k, 8, 2, rows / 16}, {2 * row, row, 16 * row}, {STREAM_K, 8, 2, 4}};
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

static bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool linear_stream_takes(Device *d, const Linear &l, Tensor x) {
  int64_t n = l.w_OK.dim[0], k = l.w_OK.dim[1];
  bool coded = l.codes.payload != nullptr;
  if (cuda_of(d)->arch != 90 || x.dtype != DT_BF16 || k % (coded ? 16 : 8) != 0) return false;
  return n * k >= FEWEST && n <= STREAM_TILES * STREAM_TILE && n * k <= INT32_MAX / 4 * 64LL &&
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
  p.a.chunks = static_cast<int>(cuda_ceil(p.a.k, STREAM_K));
  p.a.add = l.add;
  p.a.y_f32 = y_MO.dtype == DT_F32;
  p.a.paired = p.a.n % 16 == 0;
  p.a.bias = cuda_data<const bf16>(l.bias_O);
  p.a.y = y_MO.data;
  p.blocks = std::min(cuda_of(d)->sms, p.a.tiles * p.a.chunks);
  p.columns = p.a.m <= 8 ? 8 : p.a.m <= 16 ? 16 : p.a.m <= 32 ? 32 : 64;
  p.w = map_weights(l, p.a.paired);
  p.x = map_rows(x, p.columns);
  p.a.parts = static_cast<float4 *>(cuda_scratch(
      d, sizeof(float4) * 2 * static_cast<size_t>(p.blocks * p.columns / 4) * STREAM_WORKERS));
  if (!l.codes.payload) {
    stream_plain(cuda_stream(d), p);
    return;
  }
  p.c = {l.codes.scales, l.format.block, static_cast<int>(wire_row_blocks(l.format, p.a.k)),
         l.format.scale == DT_BF16};
  stream_codes(cuda_stream(d), l.format.kind, p);
}
