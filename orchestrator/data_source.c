/* Records of a data file: JSON objects, lines, or texts between separators. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/data.h"

struct Source {
  const DataSource *data;
  SourceKind kind;
  RecordReader *records; /* JSON */
  LineReader *lines;     /* the others */
  Marked text;           /* TEXTS: what is being collected */
  char *place;
  int64_t n;
};

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), m = strlen(end);
  return n >= m && !strcmp(s + n - m, end);
}

Source *source_open(const DataSource *data, Error *err) {
  Source *s = mem_zalloc(1, sizeof *s);
  s->data = data;
  if (data->separator[0])
    s->kind = SOURCE_TEXTS;
  else if (ends_with(data->path, ".txt") || ends_with(data->path, ".txt.gz"))
    s->kind = SOURCE_LINES;
  if (s->kind == SOURCE_JSON)
    s->records = records_open(data->path, err);
  else
    s->lines = lines_open(data->path, err);
  if (s->records || s->lines) return s;
  source_close(s);
  return NULL;
}

void source_close(Source *s) {
  if (!s) return;
  records_close(s->records);
  lines_close(s->lines);
  marked_free(&s->text);
  free(s->place);
  free(s);
}

bool text_is_blank(const char *s, size_t len) {
  for (size_t i = 0; i < len; i++)
    if (!s[i] || !strchr(" \t\r\n", s[i])) return false;
  return true;
}

static void set_place(Source *s) {
  free(s->place);
  s->place = mem_printf("%s:%lld", s->data->path, (long long)lines_number(s->lines));
}

static int next_line(Source *s, Record *out, Error *err) {
  int got;
  do got = lines_next(s->lines, &out->text, &out->len, err);
  while (got == 1 && text_is_blank(out->text, out->len));
  if (got == 1) set_place(s);
  return got;
}

static bool is_separator(const Source *s, const char *line, size_t len) {
  return len == strlen(s->data->separator) && !memcmp(line, s->data->separator, len);
}

static int next_text(Source *s, Record *out, Error *err) {
  const char *line;
  size_t len, filled = 0; /* up to the end of the last line that is not blank */
  int got;
  marked_clear(&s->text);
  while ((got = lines_next(s->lines, &line, &len, err)) == 1) {
    bool blank = text_is_blank(line, len);
    if (is_separator(s, line, len)) {
      if (filled) break;
      continue;
    }
    if (blank && !filled) continue;
    if (!filled) set_place(s);
    marked_put(&s->text, line, len, true);
    if (!blank) filled = s->text.len;
    marked_put(&s->text, "\n", 1, true);
  }
  out->text = s->text.text;
  out->len = filled;
  return got < 0 ? -1 : filled > 0;
}

int source_next(Source *s, Record *out, Error *err) {
  *out = (Record){.kind = s->kind};
  if (s->data->max_records > 0 && s->n == s->data->max_records) return 0;
  int got;
  if (s->kind == SOURCE_JSON)
    got = records_next(s->records, &out->json, err);
  else
    got = s->kind == SOURCE_LINES ? next_line(s, out, err) : next_text(s, out, err);
  if (got == 1) {
    out->place = s->kind == SOURCE_JSON ? records_place(s->records) : s->place;
    s->n++;
  }
  return got;
}
