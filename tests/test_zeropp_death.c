/* Broken contracts end the process, and all its fellow ranks, with the cause on standard error.
 *
 * The program is its own victim: `test_zeropp_death NAME` carries out one misdeed. The tests start
 * it alone and under mpirun and read what it said. */
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/internal.h"

static void step_while_held(TestModel *m) {
  zeropp_gather(m->z, 1);
  zeropp_step(m->z, (AdamW){.lr = 1}, 0);
}
static void step_while_held_twice(TestModel *m) {
  zeropp_gather_all(m->z);
  zeropp_gather_all(m->z);
  zeropp_release_all(m->z);
  zeropp_step(m->z, (AdamW){.lr = 1}, 0);
}
static void write_while_held(TestModel *m) {
  zeropp_gather(m->z, 2);
  zeropp_weights_written(m->z);
}
static void init_while_held(TestModel *m) {
  zeropp_gather(m->z, 2);
  zeropp_init_random(m->z, 1);
}
static void load_while_held(TestModel *m) {
  zeropp_gather(m->z, 0);
  zeropp_load_state(m->z, "nowhere", NULL);
}
static void copy_while_held(TestModel *m) {
  TestModel from = test_model(0, false);
  zeropp_init_random(from.z, 1);
  zeropp_gather(m->z, 3);
  zeropp_copy_weights(m->z, from.z);
}
static void step_while_open(TestModel *m) {
  zeropp_open_grad(m->z, 1);
  zeropp_step(m->z, (AdamW){.lr = 1}, 0);
}
static void zero_while_open(TestModel *m) {
  zeropp_open_grad(m->z, 1);
  zeropp_zero_grad(m->z);
}
static void scale_while_open(TestModel *m) {
  zeropp_open_grad(m->z, 1);
  zeropp_scale_grad(m->z, 2);
}
static void read_released_weight(TestModel *m) {
  zeropp_gather(m->z, 1);
  zeropp_release(m->z, 1);
  zeropp_weight(m->z, 1);
}
static void read_closed_grad(TestModel *m) {
  zeropp_open_grad(m->z, 1);
  zeropp_reduce(m->z, 1);
  zeropp_grad(m->z, 1);
}
static void reduce_twice(TestModel *m) {
  zeropp_open_grad(m->z, 1);
  zeropp_reduce(m->z, 1);
  zeropp_reduce(m->z, 1);
}
static void release_twice(TestModel *m) {
  zeropp_gather(m->z, 1);
  zeropp_release(m->z, 1);
  zeropp_release(m->z, 1);
}
static void join_strangers(TestModel *m) {
  zeropp_gather(m->z, 1);
  zeropp_weight_joined(m->z, zeropp_find(m->z, "0.v.weight"), 2);
}
static void gather_unwritten(TestModel *m) {
  TestModel fresh = test_model(0, false);
  (void)m;
  zeropp_gather(fresh.z, 0);
}
static void read_unwritten_secondary(TestModel *m) {
  ZeroPPConfig cfg = {.stage = 3, .qwz = WIRE_INT8, .hpz = HPZ_QUANTIZED};
  TestModel fresh = test_model_of(0, cfg);
  (void)m;
  zeropp_prefetch(fresh.z, 1);
}
static void quantize_nothing(TestModel *m) {
  (void)m;
  test_model_of(0, (ZeroPPConfig){.stage = 3, .hpz = HPZ_QUANTIZED});
}
static void train_frozen(TestModel *m) {
  TestModel frozen = test_model(0, false);
  (void)m;
  zeropp_open_grad(frozen.z, 0);
}
static void skip_a_unit(TestModel *m) {
  ParamSpec specs[2] = {{.name = "a", .ndim = 1, .dim = {4, 1}},
                        {.name = "b", .unit = 2, .ndim = 1, .dim = {4, 1}}};
  ZeroPPConfig cfg = {.stage = 3};
  zeropp_create(m->device, m->grid, &cfg, specs, 2);
}
static void join_other_widths(TestModel *m) {
  ParamSpec specs[2] = {{.name = "a", .ndim = 2, .dim = {4, 3}},
                        {.name = "b", .ndim = 2, .dim = {4, 2}, .joined = true}};
  ZeroPPConfig cfg = {.stage = 3};
  zeropp_create(m->device, m->grid, &cfg, specs, 2);
}

/* Under mpirun: one rank does it, the others wait for it in a collective. */
static void die_alone(TestModel *m) {
  if (m->grid->rank == 1) die("a cause of %s own", "its");
  comm_barrier(m->grid->all);
}
static void call_otherwise(TestModel *m) { /* rank 0 expects more of rank 1 than that sends */
  char data[64] = {0};
  size_t bytes[3] = {8, m->grid->rank == 0 ? 16 : 8, 8};
  comm_all_gather(m->grid->all, data, data + 16, bytes);
  comm_barrier(m->grid->all);
}
static void send_too_much(TestModel *m) { /* rank 0 expects less of rank 1 than that sends */
  char data[64] = {0};
  size_t bytes[3] = {8, m->grid->rank == 0 ? 4 : 8, 8};
  comm_all_gather(m->grid->all, data, data + 16, bytes);
  comm_barrier(m->grid->all);
}

static void hold_other_weights(TestModel *m) { /* one bit, of what the other rank owns */
  ZeroPPConfig cfg = {.stage = 3,
                      .trainable = true,
                      .wire = WIRE_BF16,
                      .hpz = HPZ_ON,
                      .refresh = REFRESH_DELTA,
                      .refresh_check = 1};
  TestModel two = test_model_of(1, cfg);
  zeropp_init_random(two.z, 1);
  zeropp_gather_all(two.z);
  zeropp_release_all(two.z);
  if (m->grid->rank == 1) two.z->units[2].secondary[0] ^= 1;
  zeropp_step(two.z, (AdamW){.lr = 1e-6F, .eps = 1e-8F}, 0);
  zeropp_gather(two.z, 0);
}

typedef struct Misdeed {
  const char *name;
  void (*act)(TestModel *m);
  const char *says; /* what must be on standard error */
  int ranks;        /* 0: alone, without mpirun */
} Misdeed;

#define UNIT1 "unit 1 (0.norm.weight...)"
static const Misdeed misdeeds[] = {
    {"step_while_held", step_while_held, "step: " UNIT1 " is still held by 1 gather", 0},
    {"step_while_held_twice", step_while_held_twice, "unit 0 (embed.weight...) is still held", 0},
    {"write_while_held", write_while_held, "unit 2 (1.norm.weight...) is still held", 0},
    {"init_while_held", init_while_held, "unit 2 (1.norm.weight...) is still held", 0},
    {"load_while_held", load_while_held, "load: unit 0 (embed.weight...) is still held", 0},
    {"copy_while_held", copy_while_held, "unit 3 (norm.weight...) is still held", 0},
    {"step_while_open", step_while_open, "step: the gradient of " UNIT1 " is open", 0},
    {"zero_while_open", zero_while_open, "zero_grad: the gradient of " UNIT1 " is open", 0},
    {"scale_while_open", scale_while_open, "scale_grad: the gradient of " UNIT1 " is open", 0},
    {"read_released_weight", read_released_weight, "weight 0.norm.weight is read", 0},
    {"read_closed_grad", read_closed_grad, "gradient of 0.norm.weight is asked for", 0},
    {"reduce_twice", reduce_twice, "reduction of " UNIT1, 0},
    {"release_twice", release_twice, "release of " UNIT1, 0},
    {"join_strangers", join_strangers, "0.q.bias is not joined to 0.v.weight", 0},
    {"gather_unwritten", gather_unwritten, "no weights were written yet", 0},
    {"read_unwritten_secondary", read_unwritten_secondary, "no weights were written yet", 0},
    {"quantize_nothing", quantize_nothing, "broken contract: c->hpz", 0},
    {"train_frozen", train_frozen, "broken contract", 0},
    {"skip_a_unit", skip_a_unit, "parameter b: units must ascend", 0},
    {"join_other_widths", join_other_widths, "parameter b: nothing of its width", 0},
    {"die_alone", die_alone, "rank 1: tests/test_zeropp_death.c:", 3},
    {"die_alone", die_alone, "a cause of its own", 3},
    {"call_otherwise", call_otherwise, "rank 0: kernels/cpu/comm_exchange.c:", 3},
    {"call_otherwise", call_otherwise,
     "all-gather over group 'all': rank 1 sent 8 bytes where 16 were expected", 3},
    {"send_too_much", send_too_much, "all-gather with rank 1 over group 'all': MPI_ERR_TRUNCATE",
     3},
    {"step_while_held", step_while_held, "step: " UNIT1 " is still held by 1 gather", 2},
    {"hold_other_weights", hold_other_weights,
     "refresh: of unit 2 (1.norm.weight...) rank 1 holds other weights than rank 0, which owns "
     "them",
     2},
};
enum { N_MISDEEDS = sizeof misdeeds / sizeof *misdeeds };

static int commit(const char *name) {
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  int argc = 0;
  char **argv = NULL;
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  for (int i = 0; i < N_MISDEEDS; i++) {
    if (strcmp(misdeeds[i].name, name) != 0) continue;
    TestModel m = test_model(0, true);
    zeropp_init_random(m.z, 1);
    misdeeds[i].act(&m);
    launch_finish();
    return 0; /* it was let through */
  }
  return 0;
}

static char self[1024];

/* What the misdeed wrote, and its exit status. */
static int witness(const Misdeed *d, char *text, size_t size) {
  char command[2048], mpirun[64] = "";
  if (d->ranks) snprintf(mpirun, sizeof mpirun, "mpirun -n %d --bind-to none", d->ranks);
  snprintf(command, sizeof command, "timeout 60 %s %s %s 2>&1 </dev/null", mpirun, self, d->name);
  FILE *f = popen(command, "r");  // NOLINT(cert-env33-c): the test's own program
  assert_non_null(f);
  size_t n = fread(text, 1, size - 1, f);
  text[n] = 0;
  while (fgetc(f) != EOF) continue;
  return pclose(f);
}

static void check_misdeeds(bool alone) {
  static char text[1 << 16];
  for (int i = 0; i < N_MISDEEDS; i++) {
    if ((misdeeds[i].ranks == 0) != alone) continue;
    int status = witness(&misdeeds[i], text, sizeof text);
    if (status == 0 || !strstr(text, misdeeds[i].says))
      print_error("%s: status %d, expected '%s', said: %s\n", misdeeds[i].name, status,
                  misdeeds[i].says, text);
    assert_int_not_equal(status, 0);
    assert_int_not_equal(status >> 8, 124); /* timeout's: someone was left waiting */
    assert_non_null(strstr(text, misdeeds[i].says));
  }
}

static void broken_contracts_die_by_name(void **state) {
  (void)state;
  check_misdeeds(true);
}

static void one_rank_ends_all(void **state) {
  (void)state;
  check_misdeeds(false);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(broken_contracts_die_by_name),
    cmocka_unit_test(one_rank_ends_all),
};

int main(int argc, char **argv) {
  if (argc > 1) return commit(argv[1]);
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 1;
  return test_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
