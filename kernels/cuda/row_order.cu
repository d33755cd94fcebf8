/* A stable sort of row numbers in one launch. A block owns a range of numbers: it reads the whole
 * list, which is small beside the rows themselves, so it knows where its range begins in the sorted
 * order without asking others. While it reads and counts it lists its own places in shared memory;
 * only where these are too many it reads again and lists them outside. One warp puts them in order.
 */
#include <algorithm>
#include <cassert>

#include "kernels/cuda/row_order.h"

enum {
  ORDER_THREADS = 1024,
  ORDER_WARPS = ORDER_THREADS / 32,
  ORDER_READS = 16, /* of a thread at once */
  ORDER_EACH = 4,
  ORDER_MOST_NUMBERS = 8192,
  ORDER_LISTED = 1024, /* places that the list in shared memory takes */
  ORDER_FEW = 256,
  MOST_SOON = 8 << 20 /* more pushes out what is needed first */
};

struct RowOrder {
  int r, numbers; /* places; numbers that a block owns */
  int64_t n;
  const int32_t *rows;
  Place *list, *sorted;
  const char *soon; /* 16-byte aligned; what is asked for early */
  int64_t soon_bytes;
};

/* While blocks wait for the list, memory brings to L2 what the kernel behind this one needs first:
 * PIECE bytes a lane of a block's first warp. */
__device__ inline void ask_for_soon(const RowOrder &a) {
#if __CUDA_ARCH__ >= 900
  constexpr int PIECE = 4096;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * PIECE;
  const int64_t left = a.soon_bytes - at;
  if (threadIdx.x >= 32 || left < 16) return;
  const int bytes = left < PIECE ? static_cast<int>(left) / 16 * 16 : PIECE;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(a.soon + at)), "r"(bytes)
               : "memory");
#endif
}

/* Sum of x over the threads before this one, and over all. */
__device__ inline int block_scan(int x, int *total) {
  __shared__ int part[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    int left = __shfl_up_sync(0xffffffffu, sum, o);
    if (lane >= static_cast<unsigned>(o)) sum += left;
  }
  __syncthreads(); /* part may be in use */
  if (lane == 31) part[warp] = sum;
  __syncthreads();
  const int of_warp = part[lane]; /* ORDER_THREADS has 32 warps */
  *total = warp_sum(of_warp);
  return sum - x + warp_sum(lane < warp ? of_warp : 0);
}

/* A thread's reads: numbers 32 apart, relative to the block's first. What is behind the end of the
 * list is beyond all numbers. */
struct Reads {
  int row[ORDER_READS];
};
__device__ inline Reads read_numbers(const RowOrder &a, int first, int low) {
  Reads x;
  bool sound = true;
  if (first - static_cast<int>(threadIdx.x % 32) + 32 * ORDER_READS <= a.r) {
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++) x.row[e] = a.rows[first + 32 * e];
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++)
      sound = sound && static_cast<unsigned>(x.row[e]) < static_cast<unsigned>(a.n);
  } else {
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++) {
      const bool there = first + 32 * e < a.r;
      x.row[e] = there ? a.rows[first + 32 * e] : INT32_MAX;
      sound = sound && (!there || static_cast<unsigned>(x.row[e]) < static_cast<unsigned>(a.n));
    }
  }
  assert(sound);
#pragma unroll
  for (int e = 0; e < ORDER_READS; e++) x.row[e] -= low;
  return x;
}

/* Counts the block's numbers among the reads into count and lists them behind the `listed` that are
 * in the list. Returns how many these are. */
__device__ inline int list_numbers(const Reads &x, int first, int low, int own, int *count,
                                   Place *list, int listed, int turn) {
  __shared__ int of_warps[2][ORDER_WARPS];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned here = 0;
#pragma unroll
  for (int e = 0; e < ORDER_READS; e++)
    here |= static_cast<unsigned>(x.row[e]) < static_cast<unsigned>(own) ? 1u << e : 0;
  int *of_warp = of_warps[turn % 2]; /* the other may be in use */
  const int mine = __reduce_add_sync(0xffffffffu, __popc(here));
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  const int of_this = of_warp[lane];
  int at = listed + __reduce_add_sync(0xffffffffu, lane < warp ? of_this : 0);
  const unsigned any = __reduce_or_sync(0xffffffffu, here);
#pragma unroll
  for (int e = 0; e < ORDER_READS; e++) {
    if (!(any >> e & 1)) continue;
    const bool is_here = here >> e & 1;
    const unsigned all = __ballot_sync(0xffffffffu, is_here);
    const int to = at + __popc(all & ((1u << lane) - 1));
    if (is_here) {
      atomicAdd(&count[x.row[e]], 1);
      if (to < ORDER_LISTED)
        list[to] = static_cast<Place>(x.row[e] + low) << 32 | static_cast<Place>(first + 32 * e);
    }
    at += __popc(all);
  }
  return __reduce_add_sync(0xffffffffu, of_this);
}

/* Counts the block's numbers into count, which becomes where each begins in the sorted order.
 * Returns where the block's range does; *total places are in it, and in the list the first. */
__device__ inline int count_numbers(const RowOrder &a, int low, int own, int *count, Place *list,
                                    int *total) {
  int before = 0, listed = 0, turn = 0;
  for (int j = threadIdx.x; j < own; j += ORDER_THREADS) count[j] = 0;
  wait_for_kernel_before();
  for (int base = 0; base < a.r; base += ORDER_THREADS * ORDER_READS, turn++) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = base + warp * 32 * ORDER_READS + lane;
    const Reads x = read_numbers(a, first, low);
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++) before += x.row[e] < 0;
    listed += list_numbers(x, first, low, own, count, list, listed, turn);
  }
  before = block_sum(before);
  const int each = (own + ORDER_THREADS - 1) / ORDER_THREADS, first = threadIdx.x * each;
  int sum = 0;
  for (int j = first; j < first + each && j < own; j++) sum += count[j];
  int at = before + block_scan(sum, total);
  for (int j = first; j < first + each && j < own; j++) {
    const int n = count[j];
    count[j] = at;
    at += n;
  }
  __syncthreads();
  return before;
}

/* The block's places, outside, in the order of the list. */
__device__ inline void list_places(const RowOrder &a, int64_t low, int own, int to) {
  for (int base = 0; base < a.r; base += ORDER_THREADS * ORDER_EACH) {
    const int first = base + static_cast<int>(threadIdx.x) * ORDER_EACH;
    int row[ORDER_EACH], mine = 0, all;
#pragma unroll
    for (int e = 0; e < ORDER_EACH; e++) {
      row[e] = first + e < a.r ? a.rows[first + e] : -1;
      if (row[e] < low || row[e] >= low + own) row[e] = -1;
      mine += row[e] >= 0;
    }
    int at = to + block_scan(mine, &all);
#pragma unroll
    for (int e = 0; e < ORDER_EACH; e++)
      if (row[e] >= 0)
        a.list[at++] = static_cast<Place>(row[e]) << 32 | static_cast<Place>(first + e);
    to += all;
  }
  __syncthreads();
}

/* Few places: each counts its equals before it. */
__device__ inline void put_few_in_order(const RowOrder &a, int low, int own, const Place *list,
                                        int first, int n, const int *start) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= n) return;
  const Place p = list[i];
  const int j = static_cast<int>(row_of(p)) - low, end = j + 1 < own ? start[j + 1] : first + n;
  int to = start[j];
  if (end - to > 1) {
#pragma unroll 8
    for (int k = 0; k < i; k++) to += row_of(list[k]) == row_of(p);
  }
  a.sorted[to] = p;
}

/* One warp: 32 of n places at a time, equal numbers behind each other. */
__device__ inline void put_in_order(const RowOrder &a, int64_t low, const Place *list, int n,
                                    int *start) {
  enum { UNROLL = 4 };
  const int lane = threadIdx.x;
  for (int base = 0; base < n; base += 32 * UNROLL) {
    Place p[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (base + 32 * u + lane < n) p[u] = list[base + 32 * u + lane];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool there = base + 32 * u + lane < n;
      const int j = there ? static_cast<int>(row_of(p[u]) - low) : -1;
      const unsigned equal = __match_any_sync(0xffffffffu, j);
      const int rank = __popc(equal & ((1u << lane) - 1));
      const int to = there ? start[j] + rank : 0;
      __syncwarp();
      if (there && rank == 0) start[j] += __popc(equal);
      if (there) a.sorted[to] = p[u];
      __syncwarp();
    }
  }
}

__global__ void __launch_bounds__(ORDER_THREADS) row_order_kernel(RowOrder a) {
  extern __shared__ int start[];
  __shared__ Place list[ORDER_LISTED];
  let_next_kernel_start();
  ask_for_soon(a);
  const int low = static_cast<int>(blockIdx.x) * a.numbers;
  const int own = a.n - low < a.numbers ? static_cast<int>(a.n - low) : a.numbers;
  int total;
  const int first = count_numbers(a, low, own, start, list, &total);
  if (total == 0) return;
  const bool listed = total <= ORDER_LISTED;
  if (total <= ORDER_FEW) {
    put_few_in_order(a, low, own, list, first, total, start);
    return;
  }
  if (!listed) list_places(a, low, own, first);
  if (threadIdx.x < 32) put_in_order(a, low, listed ? list : a.list + first, total, start);
}

static size_t places_bytes(int64_t r) {
  return (static_cast<size_t>(r) * sizeof(Place) + 255) / 256 * 256;
}
size_t row_order_bytes(int64_t r) { return 2 * places_bytes(r); }

const Place *cuda_row_order(Device *d, Tensor rows_R, Tensor x_NC, void *scratch) {
  const int64_t n = x_NC.dim[0], r = rows_R.dim[0];
  require(r > 0 && r <= INT32_MAX && n > 0 && n <= INT32_MAX);
  int64_t numbers = cuda_ceil(n, cuda_of(d)->sms);
  if (numbers > ORDER_MOST_NUMBERS) numbers = ORDER_MOST_NUMBERS;
  char *bytes = static_cast<char *>(scratch);
  Place *sorted = reinterpret_cast<Place *>(bytes + places_bytes(r));
  RowOrder a = {static_cast<int>(r),
                static_cast<int>(numbers),
                n,
                tensor_i32(rows_R),
                reinterpret_cast<Place *>(bytes),
                sorted,
                cuda_data<const char>(x_NC),
                0};
  if (reinterpret_cast<uintptr_t>(a.soon) % 16 == 0)
    a.soon_bytes = std::min<int64_t>(static_cast<int64_t>(tensor_bytes(x_NC)), MOST_SOON);
  launch_behind(d, grid_of(cuda_ceil(n, numbers)), ORDER_THREADS,
                sizeof(int) * static_cast<size_t>(numbers), row_order_kernel, a);
  return sorted;
}
