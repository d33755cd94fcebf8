/* safetensors data as float or int32, converted a chunk at a time. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/safetensors.h"

enum { CHUNK = 1 << 15 }; /* elements */

static int64_t chunk_at(int64_t done, int64_t n) { return n - done < CHUNK ? n - done : CHUNK; }

static bool is_float(DType t) { return t == DT_F32 || t == DT_F16 || t == DT_BF16 || t == DT_F64; }

static bool is_integer(DType t) {
  return t == DT_I32 || t == DT_I64 || t == DT_I16 || t == DT_I8 || t == DT_U8 || t == DT_BOOL;
}

int st_read_f32(const StFile *f, const StEntry *e, int64_t start, int64_t n, float *dst,
                Error *err) {
  if (e->dtype == DT_F32) return st_read_raw(f, e, start, n, dst, err);
  if (!is_float(e->dtype))
    return error_set(err, "%s: tensor \"%s\" is %s; expected F32, F16, BF16 or F64", st_path(f),
                     e->name, dtype_name(e->dtype));
  void *raw = mem_alloc(CHUNK, dtype_size(e->dtype));
  int bad = 0;
  for (int64_t done = 0; !bad && done < n; done += CHUNK) {
    int64_t m = chunk_at(done, n);
    bad = st_read_raw(f, e, start + done, m, raw, err);
    if (!bad) convert_to_f32(raw, e->dtype, dst + done, (size_t)m);
  }
  free(raw);
  return bad;
}

static int64_t integer_at(const void *raw, DType t, int64_t i) {
  switch (t) {
    case DT_I64:
      return ((const int64_t *)raw)[i];
    case DT_I32:
      return ((const int32_t *)raw)[i];
    case DT_I16:
      return ((const int16_t *)raw)[i];
    case DT_I8:
      return ((const int8_t *)raw)[i];
    default: /* U8 and BOOL */
      return ((const uint8_t *)raw)[i];
  }
}

static int narrow(const StFile *f, const StEntry *e, int64_t first, const void *raw, int64_t n,
                  int32_t *dst, Error *err) {
  for (int64_t i = 0; i < n; i++) {
    int64_t x = integer_at(raw, e->dtype, i);
    if (x < INT32_MIN || x > INT32_MAX)
      return error_set(
          err, "%s: tensor \"%s\": element %" PRId64 " is %" PRId64 "; expected a 32-bit integer",
          st_path(f), e->name, first + i, x);
    dst[i] = (int32_t)x;
  }
  return 0;
}

int st_read_i32(const StFile *f, const StEntry *e, int64_t start, int64_t n, int32_t *dst,
                Error *err) {
  if (!is_integer(e->dtype))
    return error_set(err, "%s: tensor \"%s\" is %s; expected an integer type", st_path(f), e->name,
                     dtype_name(e->dtype));
  void *raw = mem_alloc(CHUNK, dtype_size(e->dtype));
  int bad = 0;
  for (int64_t done = 0; !bad && done < n; done += CHUNK) {
    int64_t m = chunk_at(done, n);
    bad = st_read_raw(f, e, start + done, m, raw, err);
    if (!bad) bad = narrow(f, e, start + done, raw, m, dst + done, err);
  }
  free(raw);
  return bad;
}
