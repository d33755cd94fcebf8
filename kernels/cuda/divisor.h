/* Division by numbers that a launch fixes, such as a page's size: a product and a shift instead of
 * the some forty instructions, one waiting for the other, that a division takes on a GPU. */
#ifndef KERNELS_CUDA_DIVISOR_H
#define KERNELS_CUDA_DIVISOR_H

#include <cstdint>

/* d <= 2^l, factor = ceil(2^(31 + l) / d) < 2^32: for n below 2^31 the product is too large by less
 * than 2^(31 + l) / d, and the quotient right (Granlund and Montgomery 1994, theorem 4.2). */
struct Divisor {
  uint32_t d, factor;
  int shift;
};
static inline Divisor divisor_of(int d) {
  int l = 0;
  while ((int64_t{1} << l) < d) l++;
  uint64_t by = static_cast<uint64_t>(d), one = uint64_t{1} << (31 + l);
  return {static_cast<uint32_t>(d), static_cast<uint32_t>((one + by - 1) / by), 31 + l};
}

/* n / d for 0 <= n < 2^31. */
__host__ __device__ inline int divide(int n, const Divisor &d) {
  return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * d.factor >> d.shift);
}

#endif
