/* Fuzz target: the safetensors reader. A file that opens must be readable to its last element.
 * corpus: data/malformed/runai-safetensors */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/safetensors.h"
#include "tests/fuzz.h"

const FuzzSeed fuzz_seeds[] = {
    FUZZ_SEED("\x02\0\0\0\0\0\0\0{}"),
    FUZZ_SEED("\x40\0\0\0\0\0\0\0"
              "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}}        "
              "\0\0\x80?\0\0\0\xc0"),
    FUZZ_SEED("\x90\0\0\0\0\0\0\0"
              "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[],"
              "\"data_offsets\":[2,4]},\"c\":{\"dtype\":\"I8\",\"shape\":[2],\"data_offsets\":[0,2]"
              "}}       "
              "\x01\x02\x80?"),
};
const int fuzz_n_seeds = sizeof fuzz_seeds / sizeof *fuzz_seeds;

/* Inputs are small, so that a large tensor in an accepted file means the checks failed. */
static void read_entry(const StFile *f, const StEntry *e, size_t file_len) {
  if (e->numel > 0 && (e->offset > file_len || (uint64_t)e->numel > file_len))
    die("tensor \"%s\" leaves the file", e->name);
  Error err = {""};
  float *x = mem_alloc((size_t)e->numel, sizeof *x);
  int32_t *v = mem_alloc((size_t)e->numel, sizeof *v);
  st_read_f32(f, e, 0, e->numel, x, &err);
  st_read_i32(f, e, 0, e->numel, v, &err);
  if (st_read_raw(f, e, 0, e->numel / 8, x, &err)) die("%s", err.msg);
  if (st_find(f, e->name) != e) die("\"%s\" is not found", e->name);
  free(x);
  free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  char path[64];
  int fd = fuzz_file(data, len, path);
  Error err = {""};
  StFile *f = st_open(path, &err);
  if (!f && strncmp(err.msg, path, strlen(path)) != 0) die("no file name in \"%s\"", err.msg);
  for (int i = 0; f && i < st_count(f); i++) read_entry(f, st_entry(f, i), len);
  st_close(f);
  close(fd);
  return 0;
}
