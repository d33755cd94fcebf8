/* The external command: what it is told, what it may answer, and every way it can fail. */
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/fs.h"
#include "kernels/kernels.h"
#include "reward/reward.h"
#include "tests/test.h"

#define MANY 2000

static RewardInput many[MANY];

static RewardInput input_of(const char *prompt, const char *response, const char *answer) {
  return (RewardInput){.prompt_text = prompt,
                       .response_text = response,
                       .response_len = strlen(response),
                       .answer = answer};
}

static int run_command(const char *command, double seconds, const RewardInput *in, int n,
                       float *out, Error *err) {
  RewardTerm term = {
      .kind = "command", .weight = 2, .command = command, .timeout_seconds = seconds};
  err->msg[0] = 0;
  RewardTerms *t = reward_terms_create(&term, 1, err);
  if (!t) fail_msg("%s", err->msg);
  int rc = reward_terms_eval(t, in, n, out, err);
  reward_terms_free(t);
  return rc;
}

/* The command, run on three answers within `seconds`, ends with one error that holds all words. */
static void fails_within(const char *command, double seconds, const char *word) {
  const RewardInput in[3] = {input_of("p", "a", NULL), input_of("p", "b", NULL),
                             input_of("p", "c", NULL)};
  float out[3] = {9, 9, 9};
  Error err;
  double start = clock_seconds();
  assert_int_equal(run_command(command, seconds, in, 3, out, &err), -1);
  if (!strstr(err.msg, word) || !strstr(err.msg, command) || !strstr(err.msg, "rewards[0]"))
    fail_msg("\"%s\" does not name \"%s\", the command and the term", err.msg, word);
  assert_null(strchr(err.msg, '\n'));
  assert_true(out[0] == 9);
  /* Far below the time that the hanging ones want; far above what a loaded machine needs. */
  assert_true(clock_seconds() - start < seconds + 8);
}

static void fails(const char *command, const char *word) { fails_within(command, 20, word); }

static void answers(void **state) {
  (void)state;
  const RewardInput in[4] = {input_of("p", "a", NULL), input_of("p", "b", NULL),
                             input_of("p", "c", NULL), input_of("p", "d", NULL)};
  float out[4];
  Error err;
  assert_int_equal(run_command("cat > /dev/null; echo 0; echo '-1.5e1 '; echo '{\"score\": 0.25, "
                               "\"why\": \"short\"}'; printf ' 7\\r'",
                               20, in, 4, out, &err),
                   0);
  assert_true(out[0] == 0 && out[1] == -30 && out[2] == 0.5f && out[3] == 14);
  /* Nothing to score: nothing is started. */
  assert_int_equal(run_command("exit 3", 20, in, 0, out, &err), 0);
}

/* What arrives is one JSON object per line with the text unchanged. */
static void requests(void **state) {
  (void)state;
  RewardInput in[2] = {input_of("say \"hi\"\n", "tab\there \\ \xc3\xa9 \x01", "hi"),
                       input_of("", "broken \xff", NULL)};
  char command[512];
  snprintf(command, sizeof command, "tee '%s/requests' | sed 's/.*/1/'", test_tmp());
  float out[2];
  Error err;
  if (run_command(command, 20, in, 2, out, &err)) fail_msg("%s", err.msg);
  char *path = fs_join(test_tmp(), "requests");
  RecordReader *r = records_open(path, &err);
  json_t *rec;
  assert_int_equal(records_next(r, &rec, &err), 1);
  assert_int_equal(json_object_size(rec), 3);
  assert_string_equal(json_string_value(json_object_get(rec, "prompt")), in[0].prompt_text);
  assert_string_equal(json_string_value(json_object_get(rec, "response")), in[0].response_text);
  assert_string_equal(json_string_value(json_object_get(rec, "answer")), "hi");
  assert_int_equal(records_next(r, &rec, &err), 1);
  assert_null(json_object_get(rec, "answer"));
  assert_string_equal(json_string_value(json_object_get(rec, "response")), "broken \xef\xbf\xbd");
  assert_int_equal(records_next(r, &rec, &err), 0);
  records_close(r);
  free(path);
}

/* Megabytes in both directions, far beyond what a pipe holds, while the command writes before it
 * has read everything: whoever waits for the other in turn would hang. */
static void large_batches_do_not_deadlock(void **state) {
  (void)state;
  static char text[4000];
  memset(text, 'x', sizeof text - 1);
  for (int i = 0; i < MANY; i++) many[i] = input_of("p", text, NULL);
  float *out = mem_alloc(MANY, sizeof *out);
  Error err;
  const char *echo = /* about 2 KB out for 4 KB in, line by line */
      "awk '{printf \"{\\\"score\\\": %d, \\\"text\\\": \\\"%s\\\"}\\n\", NR, substr($0, 40, "
      "2000); "
      "fflush()}'";
  if (run_command(echo, 60, many, MANY, out, &err)) fail_msg("%s", err.msg);
  for (int i = 0; i < MANY; i++) assert_true(out[i] == 2.0f * (float)(i + 1));
  free(out);
}

/* It need not read: SIGPIPE does not end us, and the answers count. */
static void command_that_does_not_read(void **state) {
  (void)state;
  static char text[4000];
  memset(text, 'y', sizeof text - 1);
  for (int i = 0; i < MANY; i++) many[i] = input_of("p", text, NULL);
  float *out = mem_alloc(MANY, sizeof *out);
  Error err;
  if (run_command("exec < /dev/null; seq 2000", 60, many, MANY, out, &err)) fail_msg("%s", err.msg);
  assert_true(out[0] == 2 && out[MANY - 1] == 4000);
  free(out);
  /* And the signal is as it was: neither blocked nor pending. */
  sigset_t blocked, pending;
  sigprocmask(SIG_BLOCK, NULL, &blocked);
  sigpending(&pending);
  assert_false(sigismember(&blocked, SIGPIPE) || sigismember(&pending, SIGPIPE));
}

static void command_that_dies(void **state) {
  (void)state;
  fails("seq 3; exit 3", "exited with status 3"); /* although its answers look fine */
  fails("exit 1", "exited with status 1");
  fails("seq 1; kill -9 $$", "signal 9");
  fails("kill -SEGV $$", "signal 11");
  fails("no-such-program-anywhere 2> /dev/null", "status 127");
}

static void wrong_answers(void **state) {
  (void)state;
  fails("true", "printed 0 lines");
  fails("seq 2", "printed 2 lines");
  fails("seq 4", "more than 3 lines");
  fails("echo 1; echo; echo 3", "line 2");
  fails("echo 1; echo 2 3; echo 4", "\"2 3\"");
  fails("echo 1; echo two; echo 3", "\"two\"");
  fails("echo 1; echo nan; echo 3", "finite");
  fails("echo 1; echo 2; echo -inf", "finite");
  fails("echo 1; echo 1e999; echo 3", "finite");
  fails("echo 1; echo 1e200; echo 3", "finite");
  fails("echo 1; echo '{\"scores\": 2}'; echo 3", "\"score\"");
  fails("echo 1; echo '{\"score\": \"2\"}'; echo 3", "\"score\"");
  fails("echo 1; echo '{\"score\": 2'; echo 3", "line 2");
  fails("echo 1; echo '{\"score\": NaN}'; echo 3", "line 2");
  fails("echo 1; echo '[2]'; echo 3", "line 2");
  fails("echo 1; printf '2\\0\\n'; echo 3", "line 2");
  fails("printf '\\377\\033[31m\\n1\\n2\\n'", "\"??[31m\""); /* nothing raw reaches a terminal */
}

static void floods(void **state) {
  (void)state;
  fails("yes 1", "more than 3 lines");
  fails("cat /dev/zero", "longer than");
}

/* Each takes the whole process group with it: the grandchild would write a file a second later. */
static void timeouts(void **state) {
  (void)state;
  char command[512], *path = fs_join(test_tmp(), "survivor");
  fails_within("sleep 100", 0.3, "0.3 seconds");
  snprintf(command, sizeof command, "(sleep 1; touch '%s') & sleep 100", path);
  fails_within(command, 0.3, "0.3 seconds");
  snprintf(command, sizeof command, "seq 3; (sleep 1; touch '%s') &", path);
  fails_within(command, 0.3, "0.3 seconds"); /* its shell is gone, its output still open */
  fails_within("seq 3; exec > /dev/null; sleep 100", 0.3, "0.3 seconds");
  fails_within("trap '' TERM INT HUP PIPE; sleep 100", 0.3, "0.3 seconds");
  usleep(1300000);
  assert_false(fs_exists(path));
  free(path);
}

/* The command starts with SIGPIPE as a shell has it, whatever this program did with it. */
static void signals_are_reset(void **state) {
  (void)state;
  sigset_t sigpipe, before;
  sigemptyset(&sigpipe);
  sigaddset(&sigpipe, SIGPIPE);
  for (int ignore = 0; ignore < 2; ignore++) {
    if (ignore)
      signal(SIGPIPE, SIG_IGN);
    else
      sigprocmask(SIG_BLOCK, &sigpipe, &before);
    fails("kill -PIPE $$; seq 3", "signal 13");
    if (ignore)
      signal(SIGPIPE, SIG_DFL);
    else
      sigprocmask(SIG_SETMASK, &before, NULL);
  }
}

static int open_descriptors(void) {
  int n = 0;
  for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

static void nothing_is_left(void **state) {
  (void)state;
  int before = open_descriptors();
  fails("exit 1", "status 1");
  fails("yes 1", "more than");
  fails_within("sleep 9", 0.05, "seconds");
  assert_int_equal(open_descriptors(), before);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child, no zombie */
}

static void bad_settings(void **state) {
  (void)state;
  const RewardTerm bad[] = {{.kind = "command", .command = "", .timeout_seconds = 1},
                            {.kind = "command", .timeout_seconds = 1},
                            {.kind = "command", .command = "true", .timeout_seconds = 0},
                            {.kind = "command", .command = "true", .timeout_seconds = NAN}};
  for (int i = 0; i < 4; i++) {
    Error err = {""};
    assert_null(reward_terms_create(&bad[i], 1, &err));
    assert_non_null(strstr(err.msg, i < 2 ? "command is empty" : "timeout_seconds"));
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(answers),
    cmocka_unit_test(requests),
    cmocka_unit_test(large_batches_do_not_deadlock),
    cmocka_unit_test(command_that_does_not_read),
    cmocka_unit_test(command_that_dies),
    cmocka_unit_test(wrong_answers),
    cmocka_unit_test(floods),
    cmocka_unit_test(timeouts),
    cmocka_unit_test(signals_are_reset),
    cmocka_unit_test(nothing_is_left),
    cmocka_unit_test(bad_settings),
};
TEST_MAIN(tests)
