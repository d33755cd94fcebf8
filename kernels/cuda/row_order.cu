/* A stable sort of row numbers in one launch. A block owns a range of numbers: it reads the whole
 * list, which is small beside the rows themselves, so it knows where its range begins in the sorted
 * order without asking others. It lists its own places, and one warp puts them in order. */
#include <cassert>

#include "kernels/cuda/row_order.h"

enum { ORDER_THREADS = 1024, ORDER_READS = 8, ORDER_EACH = 4, ORDER_MOST_NUMBERS = 8192 };

struct RowOrder {
  int r, numbers; /* places; numbers that a block owns */
  int64_t n;
  const int32_t *rows;
  Place *list, *sorted;
};

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

/* Counts the block's numbers into count, which becomes where each begins in the sorted order.
 * Returns where the block's range does; *total places are in it. */
__device__ inline int count_numbers(const RowOrder &a, int64_t low, int own, int *count,
                                    int *total) {
  int before = 0;
  for (int j = threadIdx.x; j < own; j += ORDER_THREADS) count[j] = 0;
  __syncthreads();
  for (int base = 0; base < a.r; base += ORDER_THREADS * ORDER_READS) {
    int row[ORDER_READS];
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++) {
      const int i = base + e * ORDER_THREADS + static_cast<int>(threadIdx.x);
      row[e] = i < a.r ? a.rows[i] : INT32_MAX;
    }
#pragma unroll
    for (int e = 0; e < ORDER_READS; e++) {
      before += row[e] < low;
      if (row[e] >= low && row[e] < low + own) atomicAdd(&count[row[e] - low], 1);
      if (row[e] == INT32_MAX) continue; /* no number: all are below n */
      assert(row[e] >= 0 && row[e] < a.n);
    }
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

/* The block's places, in the order of the list. */
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

/* One warp: 32 places at a time, equal numbers behind each other. */
__device__ inline void put_in_order(const RowOrder &a, int64_t low, int first, int end,
                                    int *start) {
  enum { UNROLL = 4 };
  const int lane = threadIdx.x;
  for (int base = first; base < end; base += 32 * UNROLL) {
    Place p[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (base + 32 * u + lane < end) p[u] = a.list[base + 32 * u + lane];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool there = base + 32 * u + lane < end;
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
  let_next_kernel_start();
  const int64_t low = static_cast<int64_t>(blockIdx.x) * a.numbers;
  const int own = a.n - low < a.numbers ? static_cast<int>(a.n - low) : a.numbers;
  int total;
  const int first = count_numbers(a, low, own, start, &total);
  if (total == 0) return;
  list_places(a, low, own, first);
  if (threadIdx.x < 32) put_in_order(a, low, first, first + total, start);
}

static size_t places_bytes(int64_t r) {
  return (static_cast<size_t>(r) * sizeof(Place) + 255) / 256 * 256;
}
size_t row_order_bytes(int64_t r) { return 2 * places_bytes(r); }

const Place *cuda_row_order(Device *d, Tensor rows_R, int64_t n, void *scratch) {
  const int64_t r = rows_R.dim[0];
  require(r > 0 && r <= INT32_MAX && n > 0 && n <= INT32_MAX);
  int64_t numbers = cuda_ceil(n, cuda_of(d)->sms);
  if (numbers > ORDER_MOST_NUMBERS) numbers = ORDER_MOST_NUMBERS;
  char *bytes = static_cast<char *>(scratch);
  Place *sorted = reinterpret_cast<Place *>(bytes + places_bytes(r));
  RowOrder a = {static_cast<int>(r), static_cast<int>(numbers),        n,
                tensor_i32(rows_R),  reinterpret_cast<Place *>(bytes), sorted};
  row_order_kernel<<<grid_of(cuda_ceil(n, numbers)), ORDER_THREADS,
                     sizeof(int) * static_cast<size_t>(numbers), cuda_stream(d)>>>(a);
  CUDA_LAUNCHED();
  return sorted;
}
