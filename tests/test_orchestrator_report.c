/* The report: phases add up to the step, tokens are counted once and as what they are, bytes are
 * those that moved, and what is printed again is what was written.
 * ranks: 1 2 3 */
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "core/fs.h"
#include "orchestrator/report.h"
#include "orchestrator/train.h"
#include "tests/test.h"

typedef struct Rig {
  Grid *grid;
  Device *device;
  Report *report;
  char dir[512];
} Rig;

static Rig rig_open(const char *name, int64_t metrics_bytes) {
  Rig rig;
  Error err = {""};
  snprintf(rig.dir, sizeof rig.dir, "%s/%s", test_tmp(), name);
  assert_int_equal(fs_make_dirs(rig.dir, &err), 0);
  rig.grid = grid_create(0, &err);
  rig.device = device_open(DEVICE_CPU, 1, &err);
  assert_non_null(rig.device);
  ReportOptions o = {.grid = rig.grid,
                     .device = rig.device,
                     .dir = rig.dir,
                     .progress = "off",
                     .metrics_bytes = metrics_bytes};
  rig.report = report_open(&o, &err);
  assert_string_equal(err.msg, "");
  return rig;
}

static void rig_close(Rig *rig) {
  report_close(rig->report);
  device_close(rig->device);
  comm_barrier(rig->grid->all);
  grid_free(rig->grid);
}

static char *read_file(const Rig *rig, const char *name) {
  Error err = {""};
  size_t len;
  char *path = fs_join(rig->dir, name), *text = fs_read(path, &len, &err);
  assert_string_equal(err.msg, "");
  free(path);
  return text;
}

/* The last line of metrics.jsonl. */
static json_t *last_line(const Rig *rig) {
  Error err = {""};
  comm_barrier(rig->grid->all);
  char *text = read_file(rig, "metrics.jsonl"), *line = text;
  size_t len = strlen(text);
  assert_true(len > 0 && text[len - 1] == '\n');
  text[len - 1] = '\0';
  for (char *p = text; *p; p++)
    if (*p == '\n') line = p + 1;
  json_t *obj = json_parse(line, strlen(line), "metrics.jsonl", &err);
  assert_non_null(obj);
  free(text);
  return obj;
}

static double number(const json_t *obj, const char *key) {
  const json_t *x = json_object_get(obj, key);
  assert_true(json_is_number(x));
  return json_number_value(x);
}

static void sleep_ms(int ms) { usleep((useconds_t)ms * 1000); }

/* One PPO-like step whose true durations are known from below. */
static double run_step(Rig *rig, int64_t step) {
  Error err = {""};
  Report *r = rig->report;
  double start = clock_seconds();
  report_phase(r, PH_ROLLOUT);
  report_count(r, 4, 40, 100);
  sleep_ms(20);
  report_phase(r, PH_REFERENCE);
  report_count(r, 4, 40, 100);
  sleep_ms(10);
  report_phase(r, PH_OTHER);
  report_metric(r, "loss", 0.5);
  report_metric(r, "nothing", NAN);
  report_metric_int(r, "tokens", 140);
  assert_int_equal(report_step(r, step, step, &err), 0);
  return clock_seconds() - start;
}

static void phases_add_up_to_the_step(void **state) {
  (void)state;
  Rig rig = rig_open("phases", 0);
  report_stage(rig.report, "ppo", 0, 2);
  sleep_ms(5);
  double wall = run_step(&rig, 1) + 0.005;
  json_t *line = last_line(&rig), *seconds = json_object_get(line, "seconds"), *value;
  double sum = 0, step = number(seconds, "step");
  const char *key;
  json_object_foreach(seconds, key, value) if (strcmp(key, "step") != 0) sum +=
      json_number_value(value);
  /* Every instant belongs to one phase: the sum differs by the rounding of the addition only. */
  assert_true(sum > step * (1 - 1e-9) && sum < step * (1 + 1e-9));
  assert_true(number(seconds, "rollout") >= 0.02 && number(seconds, "reference") >= 0.01);
  assert_true(step >= 0.035 &&
              step <= wall + 0.5); /* not more than passed; slack for the scheduler */
  json_decref(line);
  rig_close(&rig);
}

static void prompts_are_not_generated_tokens(void **state) {
  (void)state;
  Rig rig = rig_open("tokens", 0);
  report_stage(rig.report, "ppo", 0, 2);
  run_step(&rig, 1);
  json_t *line = last_line(&rig);
  double step = number(json_object_get(line, "seconds"), "step");
  double rate = number(line, "tokens_per_second");
  /* 100 generated, whatever the 40 prompt tokens and the reference's second look at all 140. */
  assert_true(rate * step > 99.999 && rate * step < 100.001);
  const PhaseTotals *p = report_totals(rig.report)->phase;
  assert_int_equal(p[PH_ROLLOUT].prompt_tokens, 40);
  assert_int_equal(p[PH_ROLLOUT].generated_tokens, 100);
  assert_int_equal(p[PH_ROLLOUT].sequences, 4);
  assert_true(json_is_null(json_object_get(line, "nothing")));
  assert_true(number(line, "loss") == 0.5 && number(line, "tokens") == 140);
  json_decref(line);
  rig_close(&rig);
}

static void bytes_are_those_that_moved(void **state) {
  (void)state;
  enum { BYTES = 1000 };
  Rig rig = rig_open("traffic", 0);
  Error err = {""};
  int world = rig.grid->world;
  report_stage(rig.report, "ppo", 0, 1);
  report_phase(rig.report, PH_ROLLOUT);
  char mine[BYTES] = {0}, *all = mem_alloc((size_t)world, BYTES);
  size_t *each = mem_alloc((size_t)world, sizeof *each);
  for (int r = 0; r < world; r++) each[r] = BYTES;
  comm_all_gather(rig.grid->all, mine, all, each);
  report_phase(rig.report, PH_OTHER);
  assert_int_equal(report_step(rig.report, 1, 1, &err), 0);
  const TrafficCount *c = &report_totals(rig.report)->phase[PH_ROLLOUT].traffic.of[COLL_ALL_GATHER];
  /* Each rank receives the others' blocks; one host, so all of it stays inside. */
  assert_int_equal(c->intra_bytes, (uint64_t)(BYTES * world * (world - 1)));
  assert_int_equal(c->inter_bytes, 0);
  assert_int_equal(c->calls, world > 1); /* a rank alone moves nothing */
  free(all);
  free(each);
  rig_close(&rig);
}

/* What a collective takes while its rank does something else is hidden, what it waits for is not;
 * a phase has both, of all kinds. */
static void seconds_are_told_apart(void **state) {
  (void)state;
  Rig rig = rig_open("seconds", 0);
  Error err = {""};
  comm_queue_start();
  report_stage(rig.report, "ppo", 0, 1);
  report_phase(rig.report, PH_ROLLOUT);
  char mine = 1, all[8];
  double x = 1;
  size_t each[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int turn = 0; turn < 20; turn++) { /* on a busy machine some hide nothing */
    CommTicket t = comm_start_all_gather(rig.grid->all, &mine, all, each);
    usleep(2000);
    comm_wait(t);
  }
  comm_all_reduce_f64(rig.grid->all, &x, 1, false);
  report_phase(rig.report, PH_OTHER);
  assert_int_equal(report_step(rig.report, 1, 1, &err), 0);
  const PhaseTotals *p = &report_totals(rig.report)->phase[PH_ROLLOUT];
  double waited = 0, hidden = 0;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    waited += p->traffic.of[k].seconds;
    hidden += p->traffic.of[k].hidden_seconds;
  }
  bool several = rig.grid->world > 1;
  assert_true(several ? waited > 0 && hidden > 0 : waited == 0 && hidden == 0);
  assert_true(fabs(p->comm_seconds - waited) < 1e-9 && fabs(p->hidden_seconds - hidden) < 1e-9);
  comm_queue_stop();
  rig_close(&rig);
}

/* A resumed run cuts off the lines it is going to write again, and goes on counting. */
static void resuming_cuts_and_goes_on(void **state) {
  (void)state;
  Rig rig = rig_open("resume", 0);
  report_stage(rig.report, "ppo", 0, 3);
  run_step(&rig, 1);
  int64_t kept = report_metrics_bytes(rig.report);
  ReportTotals totals = *report_totals(rig.report);
  run_step(&rig, 2);
  rig_close(&rig);

  rig = rig_open("resume", kept);
  report_set_totals(rig.report, &totals);
  report_stage(rig.report, "ppo", 1, 3);
  json_t *line = last_line(&rig);
  assert_true(number(line, "step") == 1);
  json_decref(line);
  comm_barrier(rig.grid->all);
  run_step(&rig, 2);
  assert_int_equal(report_totals(rig.report)->steps, 2);
  assert_int_equal(report_totals(rig.report)->phase[PH_ROLLOUT].generated_tokens, 200);
  rig_close(&rig);
}

/* Fewer bytes than the checkpoint knew of: lines are lost, which is said. */
static void a_shortened_file_is_refused(void **state) {
  (void)state;
  Rig rig = rig_open("short", 0);
  Error err = {""};
  ReportOptions o = {.grid = rig.grid,
                     .device = rig.device,
                     .dir = rig.dir,
                     .progress = "off",
                     .metrics_bytes = 100};
  assert_null(report_open(&o, &err));
  assert_non_null(strstr(err.msg, "metrics.jsonl"));
  rig_close(&rig);
}

/* ---- totals and table: rank 0's business, every rank may try ---- */

static ReportTotals sample_totals(void) {
  ReportTotals t = {.ranks = 2, .steps = 7, .peak_flops = 1e9, .device = "a \"machine\""};
  t.refresh = (ZeroPPRefresh){.weights = 4 << 20,
                              .changed = 1 << 20,
                              .bytes = 1 << 20,
                              .dense_bytes = 8 << 20,
                              .int8_bytes = 5 << 20,
                              .delta_units = 12,
                              .dense_units = 3};
  t.gap = (RolloutGap){.tokens = 200,
                       .sum = 5,
                       .exp_sum = 210,
                       .max = 0.75,
                       .weighed = 100,
                       .weight_sum = 98,
                       .capped = 3};
  t.phase[PH_ROLLOUT] = (PhaseTotals){.seconds = 2,
                                      .flops = 1e9,
                                      .comm_seconds = 0.25,
                                      .hidden_seconds = 0.75,
                                      .sequences = 8,
                                      .prompt_tokens = 1000,
                                      .generated_tokens = 50,
                                      .peak_bytes = 3 << 20,
                                      .calls = 7};
  t.phase[PH_ROLLOUT].traffic.of[COLL_ALL_GATHER] = (TrafficCount){.calls = 3,
                                                                   .intra_bytes = 2 << 20,
                                                                   .inter_bytes = 1 << 20,
                                                                   .seconds = 0.25,
                                                                   .hidden_seconds = 0.75};
  t.phase[PH_VALUES] = (PhaseTotals){
      .seconds = 6, .sequences = 8, .prompt_tokens = 1000, .generated_tokens = 50, .calls = 7};
  return t;
}

static char *print_table(const ReportTotals *t) {
  char *text = NULL;
  size_t len = 0;
  FILE *out = open_memstream(&text, &len);
  report_table(t, out);
  fclose(out);
  return text;
}

/* The fields of the row that begins with a title, by columns of blanks. */
static int row_fields(char *text, const char *title, char *field[16]) {
  char *row = strstr(text, title);
  assert_non_null(row);
  *strchr(row + 1, '\n') = '\0'; /* the title begins with the line break before it */
  int n = 0;
  for (char *p = strtok(row + strlen(title), " "); p && n < 16; p = strtok(NULL, " "))
    field[n++] = p;
  return n;
}

static void the_table_counts_what_it_says(void **state) {
  (void)state;
  ReportTotals t = sample_totals();
  char *text = print_table(&t), *f[16] = {NULL};
  assert_int_equal(row_fields(text, "\nrollout", f), 14);
  /* seconds, share, sequences, prompt, generated, 50 / 2 s, per rank, GFLOP, utilisation */
  const char *rollout[] = {"2.00", "25.0%", "8",    "1000", "50",   "25",   "13",
                           "1.00", "50.0%", "0.25", "0.75", "2.00", "1.00", "3.0"};
  for (int i = 0; i < 14; i++) assert_string_equal(f[i], rollout[i]);
  free(text);
  text = print_table(&t);
  assert_int_equal(row_fields(text, "\nvalues", f), 14);
  assert_string_equal(f[5], "175"); /* all 1050 tokens in 6 s: a forward runs over prompts too */
  free(text);
  text = print_table(&t);
  assert_int_equal(row_fields(text, "\nall-gather", f), 5);
  const char *gathers[] = {"3", "2.00", "1.00", "0.25", "0.75"};
  for (int i = 0; i < 5; i++) assert_string_equal(f[i], gathers[i]);
  free(text);
  text = print_table(&t);
  row_fields(text, "\ntotal", f);
  assert_string_equal(f[0], "8.00");
  assert_string_equal(f[3], "12.5%"); /* of the peak, over all seconds */
  free(text);
  text = print_table(&t);
  assert_non_null(strstr(text,
                         "\nrefresh: 25.00 % of weights changed; 1.00 MiB sent, 8.00 as "
                         "bfloat16, 5.00 as int8; 12 units by delta, 3 dense\n"));
  assert_non_null(strstr(text,
                         "\nlog-probabilities of rollout and update: |difference| 2.50e-02 in the "
                         "mean, 7.50e-01 at most; mean exp|difference| 1.050000\n"
                         "importance weights: 0.9800 in the mean, 3.00 % at the cap\n"));
  free(text);
}

static void totals_come_back(void **state) {
  (void)state;
  ReportTotals t = sample_totals(), back;
  Error err = {""};
  json_t *obj = report_totals_json(&t);
  assert_int_equal(report_totals_parse(obj, "report.json", &back, &err), 0);
  char *a = print_table(&t), *b = print_table(&back);
  assert_string_equal(a, b);
  free(a);
  free(b);
  json_object_del(json_object_get(obj, "phases"), "values");
  assert_int_equal(report_totals_parse(obj, "report.json", &back, &err), -1);
  assert_non_null(strstr(err.msg, "values"));
  json_decref(obj);
}

/* Totals stay numbers, which JSON can hold. */
static void a_gap_that_is_no_number_is_left_out(void **state) {
  (void)state;
  Rig rig = rig_open("gap", 0);
  const RolloutGap one = {.tokens = 4, .sum = 2, .exp_sum = 5, .max = 1}, *all;
  RolloutGap wide = one, wider = one;
  wide.exp_sum = (double)INFINITY;
  wider.exp_sum = 1.5e308;
  report_gap(rig.report, one);
  report_gap(rig.report, wide);
  all = &report_totals(rig.report)->gap;
  assert_true(all->tokens == 4 && all->sum == 2 && all->exp_sum == 5);
  report_gap(rig.report, wider);
  report_gap(rig.report, wider);
  assert_true(all->tokens == 8 && isfinite(all->exp_sum));
  json_t *obj = report_totals_json(report_totals(rig.report));
  assert_non_null(obj);
  json_decref(obj);
  rig_close(&rig);
}

static void a_run_is_reported_again(void **state) {
  (void)state;
  Rig rig = rig_open("again", 0);
  Error err = {""};
  char *text = NULL;
  size_t len = 0;
  FILE *out = open_memstream(&text, &len);
  assert_int_equal(report_print_run("no such directory", out, &err), -1);
  comm_barrier(rig.grid->all);
  assert_int_equal(report_print_run(rig.dir, out, &err), -1);
  assert_non_null(strstr(err.msg, "report.json"));
  comm_barrier(rig.grid->all);
  report_stage(rig.report, "ppo", 0, 1);
  run_step(&rig, 1);
  assert_int_equal(report_finish(rig.report, &err), 0);
  assert_int_equal(report_print_run(rig.dir, out, &err), 0);
  fclose(out);
  char *table = print_table(report_totals(rig.report));
  assert_string_equal(text, table);
  free(text);
  free(table);
  rig_close(&rig);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(phases_add_up_to_the_step),
    cmocka_unit_test(prompts_are_not_generated_tokens),
    cmocka_unit_test(bytes_are_those_that_moved),
    cmocka_unit_test(seconds_are_told_apart),
    cmocka_unit_test(resuming_cuts_and_goes_on),
    cmocka_unit_test(a_shortened_file_is_refused),
    cmocka_unit_test(the_table_counts_what_it_says),
    cmocka_unit_test(totals_come_back),
    cmocka_unit_test(a_gap_that_is_no_number_is_left_out),
    cmocka_unit_test(a_run_is_reported_again),
};
TEST_MAIN(tests)
