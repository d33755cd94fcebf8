/* Which checkpoint a run goes on from, and which are removed. */
#include <stdio.h>
#include <unistd.h>

#include "core/fs.h"
#include "orchestrator/checkpoint_files.h"
#include "tests/test.h"

static const char *const names[] = {"actor", "critic"};

static TrainState sample_state(int64_t run_step) {
  TrainState s = {.stage = "ppo",
                  .step = run_step - 3,
                  .run_step = run_step,
                  .position = 8 * run_step,
                  .skipped = 1,
                  .kl_coef = 0.1 + 0.2, /* 0.30000000000000004 must come back */
                  .metrics_bytes = 12345};
  s.totals.ranks = 2;
  s.totals.phase[PH_ROLLOUT].seconds = 1.0 / 3;
  return s;
}

static void put(const char *dir, const char *name, const char *text) {
  Error err = {""};
  char *path = fs_join(dir, name);
  assert_int_equal(fs_write_atomic(path, text, strlen(text), &err), 0);
  free(path);
}

/* A whole checkpoint of a run; its folder (the caller frees). */
static char *make_checkpoint(const char *run, int64_t run_step) {
  Error err = {""};
  char *dir = checkpoint_dir(run, run_step);
  assert_int_equal(fs_make_dirs(dir, &err), 0);
  put(dir, "actor.safetensors", "weights");
  put(dir, "critic.safetensors", "other weights");
  TrainState s = sample_state(run_step);
  assert_int_equal(checkpoint_write_state(dir, &s, names, (uint32_t[]){1, 2}, 2, &err), 0);
  return dir;
}

static char *fresh_run(const char *name) {
  Error err = {""};
  char *run = fs_join(test_tmp(), name);
  assert_int_equal(fs_make_dirs(run, &err), 0);
  return run;
}

static void assert_newest(const char *run, int64_t run_step) {
  Error err = {""};
  TrainState s;
  char *dir;
  assert_int_equal(checkpoint_newest(run, &dir, &s, &err), 0);
  if (run_step < 0) {
    assert_null(dir);
    return;
  }
  char *expected = checkpoint_dir(run, run_step);
  assert_string_equal(dir, expected);
  assert_int_equal(s.run_step, run_step);
  free(expected);
  free(dir);
}

static void state_comes_back(void **state) {
  (void)state;
  Error err = {""};
  char *run = fresh_run("state"), *dir = make_checkpoint(run, 40);
  TrainState s = sample_state(40), back;
  assert_int_equal(checkpoint_read_state(dir, &back, &err), 0);
  assert_string_equal(back.stage, s.stage);
  assert_int_equal(back.step, s.step);
  assert_int_equal(back.run_step, s.run_step);
  assert_int_equal(back.position, s.position);
  assert_int_equal(back.skipped, s.skipped);
  assert_int_equal(back.metrics_bytes, s.metrics_bytes);
  assert_true(back.kl_coef == s.kl_coef); /* to the bit: a resumed run is the undisturbed one */
  assert_true(back.totals.phase[PH_ROLLOUT].seconds == s.totals.phase[PH_ROLLOUT].seconds);
  free(dir);
  free(run);
}

static void the_newest_whole_one_is_taken(void **state) {
  (void)state;
  char *run = fresh_run("newest");
  assert_newest(run, -1);
  free(make_checkpoint(run, 9));
  free(make_checkpoint(run, 1000000)); /* seven digits: not by the order of names */
  free(make_checkpoint(run, 999999));
  assert_newest(run, 1000000);
  free(run);
}

/* Each of these is newer than the whole one and must be passed over. */
static void half_written_ones_are_passed_over(void **state) {
  (void)state;
  Error err = {""};
  char *run = fresh_run("half"), *dir;
  free(make_checkpoint(run, 10));

  dir = make_checkpoint(run, 20); /* still under its temporary name */
  char *tmp = mem_printf("%s.tmp", dir);
  assert_int_equal(rename(dir, tmp), 0);
  free(tmp);
  free(dir);
  assert_newest(run, 10);

  dir = make_checkpoint(run, 30); /* a file is missing */
  char *file = fs_join(dir, "critic.safetensors");
  assert_int_equal(unlink(file), 0);
  free(file);
  free(dir);
  assert_newest(run, 10);

  dir = make_checkpoint(run, 40); /* a file is cut */
  put(dir, "actor.safetensors", "weigh");
  free(dir);
  assert_newest(run, 10);

  dir = make_checkpoint(run, 50); /* state.json is cut */
  put(dir, "state.json", "{\"version\": 1, \"stage\"");
  free(dir);
  assert_newest(run, 10);

  dir = checkpoint_dir(run, 60); /* nothing in it */
  assert_int_equal(fs_make_dirs(dir, &err), 0);
  free(dir);
  assert_newest(run, 10);

  dir = make_checkpoint(run, 70); /* of a version we do not know */
  put(dir, "state.json", "{\"version\": 2}");
  free(dir);
  assert_newest(run, 10);
  free(run);
}

static bool there(const char *run, int64_t run_step) {
  char *dir = checkpoint_dir(run, run_step);
  bool is = fs_exists(dir);
  free(dir);
  return is;
}

static void only_older_ones_are_removed(void **state) {
  (void)state;
  Error err = {""};
  char *run = fresh_run("prune");
  for (int64_t i = 1; i <= 5; i++) free(make_checkpoint(run, i));
  assert_int_equal(checkpoint_prune(run, 4, 2, &err), 0);
  assert_false(there(run, 1) || there(run, 2));
  assert_true(there(run, 3) && there(run, 4));
  assert_true(there(run, 5)); /* of a run that went further before: the newest to write is 4 */
  char *half = mem_printf("%s/checkpoints/step_000002.tmp", run);
  assert_int_equal(fs_make_dirs(half, &err), 0);
  assert_int_equal(checkpoint_prune(run, 5, 1, &err), 0);
  assert_false(fs_exists(half));
  free(half);
  assert_false(there(run, 3) || there(run, 4));
  assert_true(there(run, 5));
  free(run);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(state_comes_back),
    cmocka_unit_test(the_newest_whole_one_is_taken),
    cmocka_unit_test(half_written_ones_are_passed_over),
    cmocka_unit_test(only_older_ones_are_removed),
};
TEST_MAIN(tests)
