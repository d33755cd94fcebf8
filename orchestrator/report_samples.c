/* What a PPO run did to the answers: the same held-out prompts before and after. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/json.h"
#include "orchestrator/report.h"

static char *samples_path(const char *run_dir, int64_t step) {
  return mem_printf("%s/samples/step_%06lld.jsonl", run_dir, (long long)step);
}

static void print_answer(const char *label, const json_t *rec, FILE *out) {
  const char *text = json_string_value(json_object_get(rec, "response"));
  fprintf(out, "  %s (%6.3f) ", label, json_number_value(json_object_get(rec, "score")));
  json_put_str(out, text ? text : "", text ? strlen(text) : 0);
  fputc('\n', out);
}

static int print_pairs(RecordReader *before, RecordReader *after, FILE *out, Error *err) {
  json_t *a, *b;
  int rc;
  fputs("held-out answers before and after (score)\n", out);
  while ((rc = records_next(before, &a, err)) == 1 && (rc = records_next(after, &b, err)) == 1) {
    const char *prompt = json_string_value(json_object_get(a, "prompt"));
    json_put_str(out, prompt ? prompt : "", prompt ? strlen(prompt) : 0);
    fputc('\n', out);
    print_answer("before", a, out);
    print_answer("after ", b, out);
  }
  fputc('\n', out);
  return rc;
}

int report_samples(const char *run_dir, int64_t last_step, FILE *out, Error *err) {
  char *first = samples_path(run_dir, 0), *last = samples_path(run_dir, last_step);
  int rc = 0;
  if (fs_exists(first) && fs_exists(last)) {
    RecordReader *before = records_open(first, err);
    RecordReader *after = before ? records_open(last, err) : NULL;
    rc = after ? print_pairs(before, after, out, err) : -1;
    if (before) records_close(before);
    if (after) records_close(after);
  }
  free(first);
  free(last);
  return rc;
}
