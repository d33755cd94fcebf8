/* The external command: one process per batch. It gets a JSON object per answer on its standard
 * input, one a line, {"prompt", "response", "answer" when there is one}, and prints as many lines:
 * a number, or an object with a number "score". */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/json.h"
#include "reward/process.h"
#include "reward/terms.h"

#define MAX_LINE_BYTES (64 * 1024)

int term_command_setup(Term *t, const RewardTerm *row, Error *err) {
  if (!row->command || !row->command[0])
    return error_set(err, "command is empty, expected a shell command");
  if (!(row->timeout_seconds > 0))
    return error_set(err, "timeout_seconds is %g, expected a number above 0", row->timeout_seconds);
  t->command = mem_strdup(row->command);
  t->timeout_seconds = row->timeout_seconds;
  return 0;
}

static char *write_requests(const RewardInput *in, int n, size_t *len) {
  char *text = NULL;
  FILE *f = open_memstream(&text, len);
  if (!f) die("out of memory for %d requests", n);
  for (int i = 0; i < n; i++) {
    fputs("{\"prompt\":", f);
    json_put_str(f, in[i].prompt_text, strlen(in[i].prompt_text));
    fputs(",\"response\":", f);
    json_put_str(f, in[i].response_text, in[i].response_len);
    if (in[i].answer) {
      fputs(",\"answer\":", f);
      json_put_str(f, in[i].answer, strlen(in[i].answer));
    }
    fputs("}\n", f);
  }
  if (fclose(f)) die("out of memory for %d requests", n);
  return text;
}

/* The start of a line, safe to print. */
typedef struct Quote {
  char text[61];
} Quote;

static Quote quote_line(const char *line, size_t len) {
  Quote q = {""};
  size_t n = len < sizeof q.text - 1 ? len : sizeof q.text - 1;
  for (size_t i = 0; i < n; i++)
    q.text[i] = isascii((unsigned char)line[i]) && isprint((unsigned char)line[i]) ? line[i] : '?';
  return q;
}

static int parse_object(const char *line, size_t len, int number, double *value, Error *err) {
  Error inner = {""};
  json_t *object = json_parse(line, len, "output", &inner);
  const json_t *score = object ? json_object_get(object, "score") : NULL;
  bool found = json_is_number(score);
  if (found) *value = json_number_value(score);
  json_decref(object);
  if (found) return 0;
  return error_set(err, "line %d of its output: expected a number \"score\" in \"%s\"%s%s", number,
                   quote_line(line, len).text, inner.msg[0] ? ": " : "", inner.msg);
}

static int parse_line(const char *line, size_t len, int number, double *value, Error *err) {
  while (len > 0 && isspace((unsigned char)line[len - 1])) len--;
  while (len > 0 && isspace((unsigned char)*line)) line++, len--;
  if (len > 0 && *line == '{') {
    if (parse_object(line, len, number, value, err)) return -1;
  } else {
    char *end;
    *value = strtod(line, &end);
    if (len == 0 || end != line + len)
      return error_set(err,
                       "line %d of its output: expected a number or {\"score\": number}, found "
                       "\"%s\"",
                       number, quote_line(line, len).text);
  }
  if (!isfinite((float)*value)) /* rewards are floats */
    return error_set(err, "line %d of its output: expected a finite number, found \"%s\"", number,
                     quote_line(line, len).text);
  return 0;
}

static int parse_answers(const char *text, size_t len, int n, double *value, Error *err) {
  int line = 0;
  for (const char *at = text, *end = text + len; at < end; line++) {
    const char *stop = memchr(at, '\n', (size_t)(end - at));
    if (!stop) stop = end;
    if (parse_line(at, (size_t)(stop - at), line + 1, &value[line], err)) return -1;
    at = stop + 1;
  }
  if (line < n)
    return error_set(err, "it printed %d line%s, expected one per answer: %d", line,
                     line == 1 ? "" : "s", n);
  return 0;
}

int term_command_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err) {
  size_t request_len, answer_len;
  char *request = write_requests(in, n, &request_len), *answer;
  ProcessLimits limits = {.seconds = t->timeout_seconds, .lines = n, .line_bytes = MAX_LINE_BYTES};
  int rc = process_run(t->command, request, request_len, limits, &answer, &answer_len, err);
  if (rc == 0) rc = parse_answers(answer, answer_len, n, value, err);
  if (rc) error_prefix(err, "command \"%s\"", t->command);
  free(request);
  free(answer);
  return rc;
}
