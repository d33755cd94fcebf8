/* safetensors writing. The layout is a pure function of the calls made, so that ranks agree on it
 * without talking: wider types first (each then is aligned), in the order of adding among equals.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/json.h"
#include "core/safetensors.h"

enum { ALIGN = 64, CHUNK = 1 << 15 /* elements converted at a time */ };

struct StWriter {
  char *path;
  int fd; /* -1: not open */
  StEntry *entries;
  int n, cap;
  char **meta; /* key, value, key, value, ... */
  int n_meta;
  char *header; /* NULL until laid out */
  size_t header_len;
  uint64_t bytes;
};

StWriter *stw_begin(const char *path) {
  StWriter *w = mem_zalloc(1, sizeof *w);
  w->path = mem_strdup(path);
  w->fd = -1;
  return w;
}

int stw_add(StWriter *w, const char *name, DType dtype, int ndim, const int64_t *dim) {
  require(!w->header && ndim >= 0 && ndim <= 8);
  for (int i = 0; i < w->n; i++)
    if (!strcmp(w->entries[i].name, name)) die("tensor \"%s\" is added twice to %s", name, w->path);
  if (w->n == w->cap) {
    w->cap = w->cap ? 2 * w->cap : 64;
    w->entries = mem_grow(w->entries, (size_t)w->cap, sizeof *w->entries);
  }
  StEntry *e = &w->entries[w->n];
  *e = (StEntry){.name = mem_strdup(name), .dtype = dtype, .ndim = ndim, .numel = 1};
  for (int i = 0; i < ndim; i++) {
    require(dim[i] >= 0);
    e->dim[i] = dim[i];
    e->numel *= dim[i];
  }
  return w->n++;
}

void stw_metadata(StWriter *w, const char *key, const char *value) {
  require(!w->header);
  w->meta = mem_grow(w->meta, (size_t)w->n_meta + 2, sizeof *w->meta);
  w->meta[w->n_meta++] = mem_strdup(key);
  w->meta[w->n_meta++] = mem_strdup(value);
}

static void put_text(FILE *f, const char *s) { json_put_str(f, s, strlen(s)); }

static void put_entry(FILE *f, const StEntry *e) {
  put_text(f, e->name);
  fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", dtype_name(e->dtype));
  for (int i = 0; i < e->ndim; i++) fprintf(f, i ? ",%" PRId64 : "%" PRId64, e->dim[i]);
  uint64_t end = e->offset + (uint64_t)e->numel * dtype_size(e->dtype);
  fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", e->offset, end);
}

static uint64_t place_entries(StWriter *w) {
  uint64_t at = 0;
  for (size_t size = 8; size > 0; size /= 2)
    for (int i = 0; i < w->n; i++) {
      StEntry *e = &w->entries[i];
      if (dtype_size(e->dtype) != size) continue;
      e->offset = at;
      at += (uint64_t)e->numel * size;
    }
  return at;
}

static void lay_out(StWriter *w) {
  if (w->header) return;
  uint64_t data = place_entries(w);
  FILE *f = open_memstream(&w->header, &w->header_len);
  if (!f) die("out of memory");
  fputc('{', f);
  if (w->n_meta) fputs("\"__metadata__\":{", f);
  for (int i = 0; i < w->n_meta; i += 2) {
    if (i) fputc(',', f);
    put_text(f, w->meta[i]);
    fputc(':', f);
    put_text(f, w->meta[i + 1]);
  }
  if (w->n_meta) fputc('}', f);
  for (int i = 0; i < w->n; i++) {
    if (i || w->n_meta) fputc(',', f);
    put_entry(f, &w->entries[i]);
  }
  fputc('}', f);
  fflush(f);
  for (size_t pad = (ALIGN - (8 + w->header_len) % ALIGN) % ALIGN; pad > 0; pad--) fputc(' ', f);
  if (fclose(f) != 0) die("out of memory");
  for (int i = 0; i < w->n; i++) w->entries[i].offset += 8 + w->header_len;
  w->bytes = 8 + w->header_len + data;
}

uint64_t stw_bytes(const StWriter *w) {
  lay_out((StWriter *)w); /* a cache: nothing that a caller could see changes */
  return w->bytes;
}

static int write_bytes(StWriter *w, const void *src, size_t len, uint64_t offset, Error *err) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pwrite(w->fd, (const char *)src + done, len - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error_set(err, "%s: cannot write: %s", w->path, strerror(errno));
    done += (size_t)n;
  }
  return 0;
}

int stw_create(StWriter *w, Error *err) {
  lay_out(w);
  w->fd = open(w->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (w->fd < 0) return error_set(err, "%s: cannot create: %s", w->path, strerror(errno));
  int bad = 0, code = posix_fallocate(w->fd, 0, (off_t)w->bytes);
  if (code != 0)
    bad =
        error_set(err, "%s: cannot take %" PRIu64 " bytes: %s", w->path, w->bytes, strerror(code));
  uint64_t len = w->header_len;
  if (!bad) bad = write_bytes(w, &len, sizeof len, 0, err);
  if (!bad) bad = write_bytes(w, w->header, w->header_len, 8, err);
  close(w->fd);
  w->fd = -1;
  if (bad) unlink(w->path);
  return bad;
}

int stw_open(StWriter *w, Error *err) {
  lay_out(w);
  w->fd = open(w->path, O_RDWR | O_CLOEXEC);
  if (w->fd < 0) return error_set(err, "%s: cannot open: %s", w->path, strerror(errno));
  return 0;
}

static const StEntry *piece(const StWriter *w, int index, int64_t start, int64_t n) {
  require(w->fd >= 0 && index >= 0 && index < w->n);
  const StEntry *e = &w->entries[index];
  require(start >= 0 && n >= 0 && start <= e->numel && n <= e->numel - start);
  return e;
}

int stw_write_f32(StWriter *w, int index, int64_t start, int64_t n, const float *src, Error *err) {
  const StEntry *e = piece(w, index, start, n);
  size_t size = dtype_size(e->dtype);
  uint64_t at = e->offset + (uint64_t)start * size;
  if (e->dtype == DT_F32) return write_bytes(w, src, (size_t)n * size, at, err);
  char *raw = mem_alloc(CHUNK, size);
  int bad = 0;
  for (int64_t done = 0; !bad && done < n; done += CHUNK) {
    size_t m = n - done < CHUNK ? (size_t)(n - done) : CHUNK;
    if (convert_from_f32(src + done, raw, e->dtype, m))
      die("tensor \"%s\" is %s, not a float type", e->name, dtype_name(e->dtype));
    bad = write_bytes(w, raw, m * size, at + (uint64_t)done * size, err);
  }
  free(raw);
  return bad;
}

int stw_write_i32(StWriter *w, int index, int64_t start, int64_t n, const int32_t *src,
                  Error *err) {
  const StEntry *e = piece(w, index, start, n);
  require(e->dtype == DT_I32 || e->dtype == DT_I64);
  size_t size = dtype_size(e->dtype);
  uint64_t at = e->offset + (uint64_t)start * size;
  if (e->dtype == DT_I32) return write_bytes(w, src, (size_t)n * size, at, err);
  int64_t *wide = mem_alloc(CHUNK, size);
  int bad = 0;
  for (int64_t done = 0; !bad && done < n; done += CHUNK) {
    size_t m = n - done < CHUNK ? (size_t)(n - done) : CHUNK;
    for (size_t i = 0; i < m; i++) wide[i] = src[done + (int64_t)i];
    bad = write_bytes(w, wide, m * size, at + (uint64_t)done * size, err);
  }
  free(wide);
  return bad;
}

int stw_close(StWriter *w, Error *err) {
  if (!w) return 0;
  int bad = 0;
  if (w->fd >= 0 && fsync(w->fd) != 0)
    bad = error_set(err, "%s: cannot flush to disk: %s", w->path, strerror(errno));
  if (w->fd >= 0 && close(w->fd) != 0 && !bad)
    bad = error_set(err, "%s: cannot close: %s", w->path, strerror(errno));
  for (int i = 0; i < w->n; i++) free(w->entries[i].name);
  for (int i = 0; i < w->n_meta; i++) free(w->meta[i]);
  free(w->entries);
  free((void *)w->meta);
  free(w->header);
  free(w->path);
  free(w);
  return bad;
}
