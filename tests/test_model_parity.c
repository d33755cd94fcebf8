/* Forward of a few fixtures against PyTorch; `make parity` checks all of them and the gradients.
 * Tolerance: float32 sums in another order, see tests/parity.h. */
#include "tests/model_test.h"

enum { MOST = 64 };

static float *reference(const StFile *f, const char *name, int64_t *n) {
  const StEntry *e = st_find(f, name);
  if (!e) die("no %s", name);
  float *x = mem_alloc((size_t)e->numel, sizeof *x);
  Error err = {""};
  if (st_read_f32(f, e, 0, e->numel, x, &err)) fail_msg("%s", err.msg);
  *n = e->numel;
  return x;
}

static void check_folder(const char *name, HeadKind head) {
  char *dir = mem_strdup(test_path(name)); /* skips before anything is opened */
  Bench bench = bench_open();
  Error err = {""};
  ModelOptions o = {.head = head, .zero = {.stage = 3}};
  Model *m = model_load(bench.device, bench.grid, bench.arena, dir, &o, &err);
  if (!m) fail_msg("%s", err.msg);
  char *path = fs_join(dir, "reference.safetensors");
  StFile *f = st_open(path, &err);
  assert_non_null(f);
  const StEntry *e = st_find(f, "seq0.input_ids");
  int32_t ids[MOST], rows[MOST], offsets[2] = {0, (int32_t)e->numel};
  assert_true(e->numel <= MOST);
  assert_int_equal(st_read_i32(f, e, 0, e->numel, ids, &err), 0);
  for (int i = 0; i < MOST; i++) rows[i] = i;
  Batch b = {1, offsets, ids};
  float got[MOST];
  int64_t n;
  float *want = reference(f, head == HEAD_LM ? "seq0.logprobs" : "seq0.values", &n);
  if (head == HEAD_LM)
    model_logprobs(m, b, (int)n, rows, ids + 1, 1, got, NULL);
  else
    model_values(m, b, (int)n, rows, got);
  double error = test_rel_error(got, want, (size_t)n);
  if (!(error < 2e-5)) fail_msg("%s: relative error %g", name, error);
  free(want);
  st_close(f);
  model_free(m);
  bench_close(&bench);
  free(path);
  free(dir);
}

static void llama(void **state) {
  (void)state;
  check_folder("fixtures/llama", HEAD_LM);
}
static void grouped_tied(void **state) {
  (void)state;
  check_folder("fixtures/llama-gqa", HEAD_LM);
}
static void llama3_rope(void **state) {
  (void)state;
  check_folder("fixtures/llama3-rope", HEAD_LM);
}
static void reward(void **state) {
  (void)state;
  check_folder("fixtures/llama-reward", HEAD_SCALAR);
}

static void other_families(void **state) {
  (void)state;
  static const char *const names[] = {"mistral", "qwen2", "qwen3", "phi3", "opt", "gpt2"};
  for (int i = 0; i < 6; i++) {
    char folder[32];
    snprintf(folder, sizeof folder, "fixtures/%s", names[i]);
    check_folder(folder, HEAD_LM);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(llama),  cmocka_unit_test(grouped_tied),   cmocka_unit_test(llama3_rope),
    cmocka_unit_test(reward), cmocka_unit_test(other_families),
};
TEST_MAIN(tests)
