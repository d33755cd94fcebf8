/* Whether memory can be read 16 bytes at a time, and by the copy engine. */
#ifndef KERNELS_CUDA_ALIGNED_H
#define KERNELS_CUDA_ALIGNED_H

#include <stdint.h>

static inline bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

#endif
