/* Weights in codes of a byte, as what tensor cores multiply. */
#ifndef KERNELS_CUDA_LINEAR_CODES_H
#define KERNELS_CUDA_LINEAR_CODES_H

#include <cuda_bf16.h>

#include "kernels/kernels.h"

/* Two codes, of bytes 0 and 1 (2 and 3 where `high`) of a word, as BF16. */
template <WireKind KIND>
__device__ inline uint32_t bf16_of_codes(uint32_t word, bool high) {
  uint32_t u = __byte_perm(word, 0, high ? 0x4342 : 0x4140);
  uint32_t a, b;
  __nv_bfloat162 x, y;
  if (KIND == WIRE_INT8) { /* 128 + the low bits, less 128 or 256 */
    a = (u & 0x007f007fu) | 0x43004300u;
    b = (u & 0x00800080u) | 0x43004300u;
    x = *reinterpret_cast<__nv_bfloat162 *>(&a);
    y = *reinterpret_cast<__nv_bfloat162 *>(&b);
    x = __hsub2(x, y);
  } else { /* its exponent and fraction in place, which is 2^-120 of it */
    a = (u & 0x00800080u) << 8 | (u & 0x007f007fu) << 4;
    b = 0x7b807b80u;
    x = *reinterpret_cast<__nv_bfloat162 *>(&a);
    y = *reinterpret_cast<__nv_bfloat162 *>(&b);
    x = __hmul2(x, y);
  }
  return *reinterpret_cast<uint32_t *>(&x);
}

#endif
