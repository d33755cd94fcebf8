/* Tensor: a plain value that names contiguous memory; it owns nothing.
 * Dims are spelled in names: x_NC has N tokens of the packed batch and C channels. Letters:
 * N tokens, B sequences, C hidden, H query heads, K key/value heads, D head size, V vocabulary,
 * F ffn, R selected rows, Q = (H + 2K) * D (the fused q, k, v row). */
#ifndef CORE_TENSOR_H
#define CORE_TENSOR_H

#include <stddef.h>
#include <stdint.h>

typedef enum DType {
  DT_F32,
  DT_BF16,
  DT_F16,
  DT_F64,
  DT_I8,
  DT_U8,
  DT_I16,
  DT_I32,
  DT_I64,
  DT_BOOL,
  DT_F8_E4M3,
  DT_F8_E5M2,
  DT_COUNT
} DType;

typedef struct Tensor {
  void *data; /* NULL: absent (an optional operand) */
  DType dtype;
  int ndim;       /* 1..4 */
  int64_t dim[4]; /* unused dims are 1 */
} Tensor;

size_t dtype_size(DType t);        /* bytes per element */
const char *dtype_name(DType t);   /* safetensors spelling: "F32", "BF16", ... */
int dtype_parse(const char *name); /* safetensors spelling to DType, or -1 */

Tensor tensor_1d(void *data, DType t, int64_t d0);
Tensor tensor_2d(void *data, DType t, int64_t d0, int64_t d1);
Tensor tensor_3d(void *data, DType t, int64_t d0, int64_t d1, int64_t d2);
int64_t tensor_numel(Tensor t);
size_t tensor_bytes(Tensor t);
static inline float *tensor_f32(Tensor t) { return (float *)t.data; }
static inline int32_t *tensor_i32(Tensor t) { return (int32_t *)t.data; }

/* Element conversion between F32, F16, BF16, F64 (round to nearest even; NaN stays NaN, overflow to
 * infinity). Host memory, any overlap-free pair. Returns -1 for a type that is not one of the four.
 */
int convert_to_f32(const void *src, DType from, float *dst, size_t n);
int convert_from_f32(const float *src, void *dst, DType to, size_t n);

#endif
