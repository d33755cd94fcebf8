/* Fuzz target: the JSON readers. What parses must survive being written and read again; the record
 * reader takes the same bytes as a file.
 * corpus: data/malformed/JSONTestSuite/test_parsing data/malformed/JSONTestSuite/test_transform */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/json.h"
#include "tests/fuzz.h"

const FuzzSeed fuzz_seeds[] = {
    FUZZ_SEED("{\"a\":[1,-2.5e3,true,null],\"b\\u0000\":\"\\ud83d\\ude00\"}"),
    FUZZ_SEED("{\"v\":1}\n{\"v\":\"x\"}\r\n\n{\"v\":[]}"),
    FUZZ_SEED("[{\"v\":1},\n{\"v\":2}]"),
    /* {"v":1} {"v":2} in gzip */
    FUZZ_SEED("\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xab\x56\x2a\x53\xb2\x32\xac\xe5\xaa\x06\xd1"
              "\x46\xb5\x5c\x00\xe9\x64\xf6\x04\x10\x00\x00\x00"),
};
const int fuzz_n_seeds = sizeof fuzz_seeds / sizeof *fuzz_seeds;

static void parse_twice(const char *text, size_t len) {
  Error err = {""};
  json_t *v = json_parse(text, len, "fuzz", &err);
  if (!v) {
    if (strncmp(err.msg, "fuzz:", 5) != 0) die("no place in \"%s\"", err.msg);
    return;
  }
  char *again = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
  json_t *w = again ? json_parse(again, strlen(again), "again", &err) : NULL;
  if (!w || !json_equal(v, w)) die("does not read back: %s (%s)", again ? again : "", err.msg);
  free(again);
  json_decref(v);
  json_decref(w);
}

static void read_records(const uint8_t *data, size_t len) {
  char path[64];
  int fd = fuzz_file(data, len, path);
  Error err = {""};
  RecordReader *r = records_open(path, &err);
  json_t *rec;
  int got = -1;
  while (r && (got = records_next(r, &rec, &err)) == 1)
    if (!json_is_object(rec)) die("%s: a record that is no object", records_place(r));
  if (got == -1 && strncmp(err.msg, path, strlen(path)) != 0) die("no place in \"%s\"", err.msg);
  records_close(r);
  close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  parse_twice((const char *)data, len);
  read_records(data, len);
  return 0;
}
