/* safetensors: an 8-byte little-endian header length, a JSON header {name: {dtype, shape,
 * data_offsets}}, then raw little-endian data. Reading never loads the whole file: pieces are pread
 * and converted. Writing lays the file out first, so that several ranks can pwrite their own pieces
 * of one file at the same time. Format: https://github.com/huggingface/safetensors#format */
#ifndef CORE_SAFETENSORS_H
#define CORE_SAFETENSORS_H

#include <stdint.h>

#include "core/error.h"
#include "core/tensor.h"

typedef struct StEntry {
  char *name;
  DType dtype;
  int ndim; /* 0 (scalar) .. 8 */
  int64_t dim[8];
  int64_t numel;
  uint64_t offset; /* of its first byte in the file */
} StEntry;

typedef struct StFile StFile;

/* Validates everything before returning: header length, JSON, dtypes, shapes against byte ranges,
 * ranges inside the file, no overlaps or holes, no duplicate names. */
StFile *st_open(const char *path, Error *err);
int st_count(const StFile *f);
const StEntry *st_entry(const StFile *f, int i);           /* file order of offsets */
const StEntry *st_find(const StFile *f, const char *name); /* NULL when absent */
const char *st_path(const StFile *f);
/* Reads elements [start, start + n) of the flattened tensor as they are stored. */
int st_read_raw(const StFile *f, const StEntry *e, int64_t start, int64_t n, void *dst, Error *err);
/* Reads elements [start, start + n) of the flattened tensor, converted to float (F32, F16, BF16,
 * F64) or int32 (I32, I64, I16, I8, U8, BOOL; out of range is an error). */
int st_read_f32(const StFile *f, const StEntry *e, int64_t start, int64_t n, float *dst,
                Error *err);
int st_read_i32(const StFile *f, const StEntry *e, int64_t start, int64_t n, int32_t *dst,
                Error *err);
void st_close(StFile *f);

/* A checkpoint: model.safetensors, or the shards that model.safetensors.index.json names. One view
 * on all tensors. Refuses: neither there, a shard missing, a tensor in the index but not in its
 * shard, index entries that leave the folder ("../"). */
typedef struct StSet StSet;
StSet *stset_open(const char *dir, Error *err);
StSet *stset_open_file(const char *path, Error *err); /* one file as a set */
int stset_count(const StSet *s);
const StEntry *stset_entry(const StSet *s, int i, const StFile **file);
const StEntry *stset_find(const StSet *s, const char *name, const StFile **file);
void stset_close(StSet *s);

/* Writing. Every rank makes the same layout (add in the same order), one rank creates the file, all
 * write their pieces, all close. The header is padded so that data starts at a multiple of 64. */
typedef struct StWriter StWriter;
StWriter *stw_begin(const char *path);
int stw_add(StWriter *w, const char *name, DType dtype, int ndim,
            const int64_t *dim);                                    /* its index */
void stw_metadata(StWriter *w, const char *key, const char *value); /* __metadata__ strings */
uint64_t stw_bytes(const StWriter *w);                              /* the whole file's size */
int stw_create(StWriter *w, Error *err); /* one rank: header and final size (posix_fallocate, so
                                            that a full disk shows now) */
int stw_open(StWriter *w, Error *err);   /* every rank, after a barrier behind stw_create */
int stw_write_f32(StWriter *w, int index, int64_t start, int64_t n, const float *src,
                  Error *err); /* converted to the entry's dtype */
int stw_write_i32(StWriter *w, int index, int64_t start, int64_t n, const int32_t *src,
                  Error *err);          /* I32 or I64 entries */
int stw_close(StWriter *w, Error *err); /* fsync and close; frees w also on error */

#endif
