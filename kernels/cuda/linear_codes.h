/* Weights in codes of a byte, as what tensor cores multiply. */
#ifndef KERNELS_CUDA_LINEAR_CODES_H
#define KERNELS_CUDA_LINEAR_CODES_H

#include <cuda_bf16.h>

#include "kernels/kernels.h"

/* Bytes of two words as PTX's prmt selects them: with 8 added, eight times the byte's sign. */
__device__ inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

/* Two codes, of bytes 0 and 1 (2 and 3 where `high`) of a word, as BF16. */
template <WireKind KIND>
__device__ inline uint32_t bf16_of_codes(uint32_t word, bool high) {
  uint32_t a, b;
  __nv_bfloat162 x, y;
  if (KIND == WIRE_INT8) { /* 128 + the low bits, less 128 or 256 */
    uint32_t u = select_bytes(word, 0x43434343u, high ? 0x4342 : 0x4140);
    a = u & 0xff7fff7fu;
    b = u & 0xff80ff80u;
    x = *reinterpret_cast<__nv_bfloat162 *>(&a);
    y = *reinterpret_cast<__nv_bfloat162 *>(&b);
    x = __hsub2(x, y);
  } else { /* its exponent and fraction in place, which is 2^-120 of it; the sign above them */
    uint32_t u = select_bytes(word, 0, high ? 0xb3a2 : 0x9180);
    a = (u * 16) & 0x87f087f0u;
    b = 0x7b807b80u;
    x = *reinterpret_cast<__nv_bfloat162 *>(&a);
    y = *reinterpret_cast<__nv_bfloat162 *>(&b);
    x = __hmul2(x, y);
  }
  return *reinterpret_cast<uint32_t *>(&x);
}

#endif
