/* safetensors reading. st_open checks the whole layout, so that later reads can only fail by I/O:
 * entries are sorted by offset and tile the file from the end of the header to its last byte. */
#include "core/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/json.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are read without swapping bytes");

static const uint64_t max_header = 100u * 1000 * 1000; /* the limit of the reference reader */

struct StFile {
  char *path;
  int fd;
  uint64_t size;
  StEntry *entries;
  const StEntry **by_name;
  int n;
};

static int read_bytes(const StFile *f, void *dst, size_t len, uint64_t offset, Error *err) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pread(f->fd, (char *)dst + done, len - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error_set(err, "%s: cannot read: %s", f->path, strerror(errno));
    if (n == 0)
      return error_set(err, "%s: ends at byte %" PRIu64 "; expected %zu bytes more", f->path,
                       offset + done, len - done);
    done += (size_t)n;
  }
  return 0;
}

/* ---- one entry of the header ---- */

static int parse_shape(const json_t *shape, StEntry *e, const char *where, Error *err) {
  if (!json_is_array(shape)) return error_set(err, "%s: no \"shape\" array", where);
  size_t n = json_array_size(shape);
  if (n > 8) return error_set(err, "%s: shape has %zu dimensions; at most 8 can be read", where, n);
  e->ndim = (int)n;
  e->numel = 1;
  for (size_t i = 0; i < n; i++) {
    const json_t *d = json_array_get(shape, i);
    if (!json_is_integer(d) || json_integer_value(d) < 0)
      return error_set(err, "%s: dimension %zu of the shape is no size (0 or more)", where, i);
    e->dim[i] = json_integer_value(d);
    if (__builtin_mul_overflow(e->numel, e->dim[i], &e->numel))
      return error_set(err, "%s: the shape's number of elements overflows 64 bits", where);
  }
  return 0;
}

static int parse_range(const json_t *range, StEntry *e, uint64_t room, const char *where,
                       Error *err) {
  if (!json_is_array(range) || json_array_size(range) != 2 ||
      !json_is_integer(json_array_get(range, 0)) || !json_is_integer(json_array_get(range, 1)))
    return error_set(err, "%s: no \"data_offsets\" array of two integers", where);
  int64_t begin = json_integer_value(json_array_get(range, 0));
  int64_t end = json_integer_value(json_array_get(range, 1));
  if (begin < 0 || end < begin || (uint64_t)end > room)
    return error_set(err, "%s: data_offsets [%lld, %lld] leave the file's %llu bytes of data",
                     where, (long long)begin, (long long)end, (unsigned long long)room);
  int64_t bytes;
  if (__builtin_mul_overflow(e->numel, (int64_t)dtype_size(e->dtype), &bytes) ||
      bytes != end - begin)
    return error_set(err,
                     "%s: data_offsets [%lld, %lld] are %lld bytes, but %lld elements of %s do not "
                     "take that many",
                     where, (long long)begin, (long long)end, (long long)(end - begin),
                     (long long)e->numel, dtype_name(e->dtype));
  e->offset = (uint64_t)begin;
  return 0;
}

static int parse_entry(const json_t *v, StEntry *e, uint64_t room, const char *where, Error *err) {
  const json_t *dtype = json_object_get(v, "dtype");
  if (!json_is_object(v) || !json_is_string(dtype))
    return error_set(err, "%s: expected an object with \"dtype\", \"shape\", \"data_offsets\"",
                     where);
  int t = dtype_parse(json_string_value(dtype));
  if (t < 0) return error_set(err, "%s: unknown dtype \"%s\"", where, json_string_value(dtype));
  e->dtype = (DType)t;
  if (parse_shape(json_object_get(v, "shape"), e, where, err)) return -1;
  return parse_range(json_object_get(v, "data_offsets"), e, room, where, err);
}

/* ---- the header as a whole ---- */

static int check_metadata(const StFile *f, json_t *v, Error *err) {
  if (!json_is_object(v)) return error_set(err, "%s: __metadata__ is not an object", f->path);
  const char *key;
  json_t *value;
  json_object_foreach(v, key, value) {
    if (!json_is_string(value))
      return error_set(err, "%s: __metadata__ \"%s\" is not a string", f->path, key);
  }
  return 0;
}

static bool has_controls(const char *name) {
  for (; *name; name++)
    if ((unsigned char)*name < 0x20 || *name == 0x7F) return true;
  return false;
}

static int parse_entries(StFile *f, json_t *header, uint64_t room, Error *err) {
  f->entries = mem_zalloc(json_object_size(header), sizeof *f->entries);
  const char *name;
  json_t *v;
  json_object_foreach(header, name, v) {
    if (!strcmp(name, "__metadata__")) {
      if (check_metadata(f, v, err)) return -1;
      continue;
    }
    if (has_controls(name))
      return error_set(err, "%s: the name of tensor %d holds control characters", f->path, f->n);
    StEntry *e = &f->entries[f->n++];
    e->name = mem_strdup(name);
    char *where = mem_printf("%s: tensor \"%s\"", f->path, name);
    int bad = parse_entry(v, e, room, where, err);
    free(where);
    if (bad) return -1;
  }
  return 0;
}

static uint64_t entry_bytes(const StEntry *e) { return (uint64_t)e->numel * dtype_size(e->dtype); }

static int by_offset(const void *a, const void *b) {
  const StEntry *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  uint64_t m = entry_bytes(x), n = entry_bytes(y); /* empty tensors lie before what follows them */
  if (m != n) return m < n ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(const StEntry *const *)a)->name, (*(const StEntry *const *)b)->name);
}

/* Sorts, checks that the entries tile the data, and makes offsets count from the file's start. */
static int check_tiling(StFile *f, uint64_t data, Error *err) {
  qsort(f->entries, (size_t)f->n, sizeof *f->entries, by_offset);
  uint64_t at = 0;
  for (int i = 0; i < f->n; i++) {
    StEntry *e = &f->entries[i];
    if (e->offset != at)
      return error_set(
          err, "%s: tensor \"%s\" starts at data byte %" PRIu64 ", %s byte %" PRIu64, f->path,
          e->name, e->offset,
          e->offset < at ? "inside another tensor that ends at" : "leaving a hole that starts at",
          at);
    at += entry_bytes(e);
    e->offset += data;
  }
  if (data + at != f->size)
    return error_set(err, "%s: %" PRIu64 " bytes follow the last tensor", f->path,
                     f->size - data - at);
  f->by_name = mem_alloc((size_t)f->n, sizeof(void *));
  for (int i = 0; i < f->n; i++) f->by_name[i] = &f->entries[i];
  qsort(f->by_name, (size_t)f->n, sizeof(void *), by_name);
  return 0;
}

static json_t *read_header(const StFile *f, uint64_t len, Error *err) {
  char *text = mem_alloc((size_t)len, 1), *name = mem_printf("%s: header", f->path);
  json_t *header = NULL;
  if (read_bytes(f, text, (size_t)len, 8, err) == 0)
    header = json_parse_unique(text, (size_t)len, name, err);
  if (header && !json_is_object(header)) {
    error_set(err, "%s: is not a JSON object", name);
    json_decref(header);
    header = NULL;
  }
  free(name);
  free(text);
  return header;
}

static int read_layout(StFile *f, Error *err) {
  struct stat st;
  if (fstat(f->fd, &st) != 0 || !S_ISREG(st.st_mode))
    return error_set(err, "%s: is not a regular file", f->path);
  f->size = (uint64_t)st.st_size;
  if (f->size < 8)
    return error_set(err, "%s: %" PRIu64 " bytes; a safetensors file has at least 8", f->path,
                     f->size);
  uint64_t len;
  if (read_bytes(f, &len, sizeof len, 0, err)) return -1;
  if (len > max_header || len > f->size - 8)
    return error_set(err,
                     "%s: header length %" PRIu64 "; expected at most %" PRIu64
                     " (is this a safetensors file, and is it whole?)",
                     f->path, len, f->size - 8 < max_header ? f->size - 8 : max_header);
  json_t *header = read_header(f, len, err);
  if (!header) return -1;
  int bad = parse_entries(f, header, f->size - 8 - len, err);
  json_decref(header);
  return bad ? -1 : check_tiling(f, 8 + len, err);
}

StFile *st_open(const char *path, Error *err) {
  int fd =
      open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a named pipe is refused, not waited for */
  if (fd < 0) {
    error_set(err, "%s: cannot open: %s", path, strerror(errno));
    return NULL;
  }
  StFile *f = mem_zalloc(1, sizeof *f);
  f->path = mem_strdup(path);
  f->fd = fd;
  if (read_layout(f, err) == 0) return f;
  st_close(f);
  return NULL;
}

int st_count(const StFile *f) { return f->n; }

const StEntry *st_entry(const StFile *f, int i) {
  require(i >= 0 && i < f->n);
  return &f->entries[i];
}

const StEntry *st_find(const StFile *f, const char *name) {
  StEntry key = {.name = (char *)name};
  const StEntry *k = &key;
  const StEntry **hit = bsearch(&k, f->by_name, (size_t)f->n, sizeof(void *), by_name);
  return hit ? *hit : NULL;
}

int st_read_raw(const StFile *f, const StEntry *e, int64_t start, int64_t n, void *dst,
                Error *err) {
  require(start >= 0 && n >= 0 && start <= e->numel && n <= e->numel - start);
  size_t size = dtype_size(e->dtype);
  return read_bytes(f, dst, (size_t)n * size, e->offset + (uint64_t)start * size, err);
}

const char *st_path(const StFile *f) { return f->path; }

void st_close(StFile *f) {
  if (!f) return;
  close(f->fd);
  for (int i = 0; i < f->n; i++) free(f->entries[i].name);
  free(f->entries);
  free(f->by_name);
  free(f->path);
  free(f);
}
