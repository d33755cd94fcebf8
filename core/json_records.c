/* Records of a data file, one at a time. JSON Lines are read as a stream; an array is one document
 * and is held whole. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/json.h"

struct RecordReader {
  char *name;
  LineReader *lines;
  bool started;
  json_t *array; /* NULL: JSON Lines */
  size_t next;   /* in the array */
  json_t *rec;   /* JSON Lines: the record last read, owned */
  char *place;
};

RecordReader *records_open(const char *path, Error *err) {
  LineReader *lines = lines_open(path, err);
  if (!lines) return NULL;
  RecordReader *r = mem_zalloc(1, sizeof *r);
  r->lines = lines;
  r->name = mem_strdup(!strcmp(path, "-") ? "(standard input)" : path);
  r->place = mem_strdup(r->name);
  return r;
}

static int read_array(RecordReader *r, Error *err) {
  size_t len;
  char *text = lines_rest(r->lines, &len, err);
  if (!text) return -1;
  r->array = json_parse(text, len, r->name, err);
  free(text);
  if (!r->array) return -1;
  require(json_is_array(r->array));
  return 0;
}

static int next_of_array(RecordReader *r, json_t **rec) {
  if (r->next >= json_array_size(r->array)) return 0;
  *rec = json_array_get(r->array, r->next++);
  free(r->place);
  r->place = mem_printf("%s: record %zu", r->name, r->next);
  return 1;
}

static bool is_blank(const char *s, size_t len) {
  size_t n = strspn(s, " \t\r");
  return n == len;
}

static int next_of_lines(RecordReader *r, json_t **rec, Error *err) {
  const char *line;
  size_t len;
  int got;
  do got = lines_next(r->lines, &line, &len, err);
  while (got == 1 && is_blank(line, len));
  if (got != 1) return got;
  int64_t number = lines_number(r->lines);
  free(r->place);
  r->place = mem_printf("%s:%lld", r->name, (long long)number);
  json_decref(r->rec);
  *rec = r->rec = json_parse_at(line, len, r->name, number, err);
  return r->rec ? 1 : -1;
}

int records_next(RecordReader *r, json_t **rec, Error *err) {
  if (!r->started) {
    r->started = true;
    if (lines_peek(r->lines) == '[' && read_array(r, err)) return -1;
  }
  int got = r->array ? next_of_array(r, rec) : next_of_lines(r, rec, err);
  if (got == 1 && !json_is_object(*rec)) {
    char *text = json_dumps(*rec, JSON_ENCODE_ANY | JSON_COMPACT);
    error_set(err, "%s: found %.40s%s; expected an object {...}", r->place, text ? text : "?",
              text && strlen(text) > 40 ? "..." : "");
    free(text);
    return -1;
  }
  return got;
}

const char *records_place(const RecordReader *r) { return r->place; }

void records_close(RecordReader *r) {
  if (!r) return;
  lines_close(r->lines);
  json_decref(r->array);
  json_decref(r->rec);
  free(r->name);
  free(r->place);
  free(r);
}
