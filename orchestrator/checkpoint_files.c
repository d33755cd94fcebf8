/* state.json holds the run's place and the size of every file beside it: a folder is whole when all
 * of it is there. Names sort by step. */
#include "orchestrator/checkpoint_files.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/fs.h"

char *checkpoint_dir(const char *run_dir, int64_t run_step) {
  return mem_printf("%s/checkpoints/step_%06lld", run_dir, (long long)run_step);
}

/* ---- state.json ---- */

static int64_t file_size(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 ? (int64_t)st.st_size : -1;
}

static json_t *file_sizes(const char *dir, const char *const *names, int n_names) {
  json_t *sizes = json_object();
  for (int i = 0; i < n_names; i++) {
    char *file = mem_printf("%s.safetensors", names[i]), *path = fs_join(dir, file);
    json_object_set_new(sizes, file, json_integer((json_int_t)file_size(path)));
    free(file);
    free(path);
  }
  return sizes;
}

static json_t *file_sums(const char *const *names, const uint32_t *sums, int n_names) {
  json_t *obj = json_object();
  for (int i = 0; i < n_names; i++) json_object_set_new(obj, names[i], json_integer(sums[i]));
  return obj;
}

int checkpoint_write_state(const char *dir, const TrainState *s, const char *const *names,
                           const uint32_t *sums, int n_names, Error *err) {
  json_t *obj = json_pack(
      "{s:i, s:s, s:I, s:I, s:I, s:I, s:f, s:I, s:o, s:o, s:o}", "version", 1, "stage", s->stage,
      "step", (json_int_t)s->step, "run_step", (json_int_t)s->run_step, "position",
      (json_int_t)s->position, "skipped", (json_int_t)s->skipped, "kl_coef", s->kl_coef,
      "metrics_bytes", (json_int_t)s->metrics_bytes, "files", file_sizes(dir, names, n_names),
      "crc32", file_sums(names, sums, n_names), "report", report_totals_json(&s->totals));
  char *text = obj ? json_dumps(obj, JSON_INDENT(1)) : NULL;
  if (!text) die("state.json: figures that are no JSON");
  char *path = fs_join(dir, "state.json");
  int rc = fs_write_atomic(path, text, strlen(text), err);
  free(path);
  free(text);
  json_decref(obj);
  return rc;
}

static int check_files(const char *dir, const json_t *files, Error *err) {
  const char *name;
  json_t *size;
  json_object_foreach((json_t *)files, name, size) {
    char *path = fs_join(dir, name);
    long long expected = json_integer_value(size), found = file_size(path);
    free(path);
    if (found != expected)
      return error_set(err, "%s/%s: %lld bytes, expected %lld", dir, name, found, expected);
  }
  return 0;
}

/* Counts that no run reaches, and that can still be added to. */
static const int64_t most = INT64_C(1) << 53;

static int parse_state(const json_t *obj, const char *path, TrainState *s, Error *err) {
  int64_t version;
  const char *stage;
  if (json_get_i64(obj, "version", path, 1, 1, &version, err) ||
      json_get_str_or(obj, "stage", path, "", &stage, err) ||
      json_get_i64(obj, "step", path, 0, most, &s->step, err) ||
      json_get_i64(obj, "run_step", path, 0, most, &s->run_step, err) ||
      json_get_i64(obj, "position", path, 0, most, &s->position, err) ||
      json_get_i64(obj, "skipped", path, 0, most, &s->skipped, err) ||
      json_get_f64_or(obj, "kl_coef", path, 0, &s->kl_coef, err) ||
      json_get_i64(obj, "metrics_bytes", path, 0, most, &s->metrics_bytes, err))
    return -1;
  snprintf(s->stage, sizeof s->stage, "%s", stage);
  return report_totals_parse(json_object_get(obj, "report"), path, &s->totals, err);
}

int checkpoint_read_state(const char *dir, TrainState *state, Error *err) {
  char *path = fs_join(dir, "state.json");
  json_t *obj = json_read(path, err);
  int rc = obj ? parse_state(obj, path, state, err) : -1;
  if (rc == 0) rc = check_files(dir, json_object_get(obj, "files"), err);
  json_decref(obj);
  free(path);
  return rc;
}

int checkpoint_noted_sum(const char *dir, const char *name, uint32_t *sum, Error *err) {
  char *path = fs_join(dir, "state.json");
  json_t *obj = json_read(path, err);
  int64_t value = 0;
  int rc = -1;
  if (obj && !json_object_get(obj, "crc32"))
    error_set(err, "%s: no \"crc32\" of the models", path);
  else if (obj)
    rc = json_get_i64(json_object_get(obj, "crc32"), name, path, 0, UINT32_MAX, &value, err);
  *sum = (uint32_t)value;
  json_decref(obj);
  free(path);
  return rc;
}

/* ---- choosing and removing ---- */

/* The step of a name "step_NNNNNN", or -1: "step_000010.tmp" is not a checkpoint. */
static int64_t name_step(const char *name) {
  if (strncmp(name, "step_", 5) != 0 || name[5] == '\0') return -1;
  int64_t step = 0;
  for (const char *p = name + 5; *p; p++) {
    if (*p < '0' || *p > '9' || step > INT64_MAX / 10 - 1) return -1;
    step = step * 10 + (*p - '0');
  }
  return step;
}

static int descending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x < y) - (x > y);
}

/* The names in RUN/checkpoints; the caller frees each and the list. -1 on error; none when the
 * folder is not there. */
static int list_names(const char *run_dir, char ***out, Error *err) {
  char *parent = fs_join(run_dir, "checkpoints");
  DIR *d = opendir(parent);
  int n = 0, rc = 0;
  *out = NULL;
  if (!d && errno != ENOENT) rc = error_set(err, "%s: %s", parent, strerror(errno));
  for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
    *out = mem_grow(*out, (size_t)n + 1, sizeof **out);
    (*out)[n++] = mem_strdup(e->d_name);
  }
  if (d) closedir(d);
  free(parent);
  return rc ? -1 : n;
}

static void free_names(char **names, int n) {
  for (int i = 0; i < n; i++) free(names[i]);
  free(names);
}

/* Steps that have a folder, newest first; the caller frees. Returns the count, -1 on error. */
static int list_steps(const char *run_dir, int64_t **out, Error *err) {
  char **names;
  int all = list_names(run_dir, &names, err), n = 0;
  *out = mem_alloc(all > 0 ? (size_t)all : 1, sizeof **out);
  for (int i = 0; i < all; i++) {
    int64_t step = name_step(names[i]);
    if (step >= 0) (*out)[n++] = step;
  }
  free_names(names, all);
  qsort(*out, (size_t)n, sizeof **out, descending);
  return all < 0 ? -1 : n;
}

int checkpoint_newest(const char *run_dir, char **dir, TrainState *state, Error *err) {
  int64_t *steps;
  int n = list_steps(run_dir, &steps, err);
  *dir = NULL;
  for (int i = 0; i < n && !*dir; i++) {
    Error why = {""};
    char *one = checkpoint_dir(run_dir, steps[i]);
    if (checkpoint_read_state(one, state, &why) == 0) {
      *dir = one;
    } else {
      log_warn("passing over a checkpoint that is not whole: %s", why.msg);
      free(one);
    }
  }
  free(steps);
  return n < 0 ? -1 : 0;
}

/* Folders that a killed run was writing: "step_000010.tmp". */
static int remove_half_written(const char *run_dir, Error *err) {
  char **names;
  int n = list_names(run_dir, &names, err), rc = n < 0 ? -1 : 0;
  for (int i = 0; i < n && rc == 0; i++) {
    size_t len = strlen(names[i]);
    if (len < 4 || strcmp(names[i] + len - 4, ".tmp") != 0) continue;
    char *path = mem_printf("%s/checkpoints/%s", run_dir, names[i]);
    rc = fs_remove_tree(path, err);
    free(path);
  }
  free_names(names, n);
  return rc;
}

int checkpoint_prune(const char *run_dir, int64_t run_step, int64_t keep, Error *err) {
  int64_t *steps, kept = 1;
  int n = list_steps(run_dir, &steps, err), rc = n < 0 ? -1 : 0;
  for (int i = 0; i < n && rc == 0; i++) {
    if (steps[i] >= run_step || ++kept <= keep) continue;
    char *dir = checkpoint_dir(run_dir, steps[i]);
    rc = fs_remove_tree(dir, err);
    free(dir);
  }
  free(steps);
  return rc ? rc : remove_half_written(run_dir, err);
}
