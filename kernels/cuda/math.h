/* Functions of one float for kernels that memory sets the pace of. */
#ifndef KERNELS_CUDA_MATH_H
#define KERNELS_CUDA_MATH_H

/* e^x = 2^(x log2 e) by the special function unit: its error, 2 ulp, and the product's rounding
 * make |x| 2^-24 relative and 2 ulp. NaN stays NaN; results below 2^-126 become zero. */
__device__ inline float exp_f32(float x) { return __expf(x); }

/* An infinite e^-x gives zero, as it should. */
__device__ inline float sigmoid_f32(float x) { return __fdividef(1.0f, 1.0f + exp_f32(-x)); }

#endif
