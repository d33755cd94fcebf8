/* The layout against a naive map that deals out rows and elements one at a time. */
#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/internal.h"

enum { MAX_NODES = 6, MAX_LOCAL = 8, MAX_ELEMENTS = 4096 };

/* Sizes of `parts` hands when n cards are dealt round. */
static void deal(int64_t n, int parts, int64_t *hand) {
  for (int i = 0; i < parts; i++) hand[i] = 0;
  for (int64_t i = 0; i < n; i++) hand[i % parts]++;
}

/* owner[element] = rank, slice by slice, piece by piece. */
static int64_t naive_owners(const ParamSpec *s, int nodes, int local, int *owner) {
  int64_t rows[MAX_LOCAL], piece[MAX_NODES], at = 0;
  int64_t width = s->ndim == 2 ? s->dim[1] : 1;
  deal(s->dim[0], local, rows);
  for (int j = 0; j < local; j++) {
    deal(rows[j] * width, nodes, piece);
    for (int n = 0; n < nodes; n++)
      for (int64_t i = 0; i < piece[n]; i++) owner[at++] = n * local + j;
  }
  return at;
}

static void check(const ParamSpec *s, int nodes, int local) {
  static int owner[MAX_ELEMENTS], seen[MAX_ELEMENTS];
  int64_t numel = naive_owners(s, nodes, local, owner);
  int64_t width = s->ndim == 2 ? s->dim[1] : 1;
  assert_int_equal(numel, s->dim[0] * width);
  memset(seen, 0, sizeof seen);
  for (int j = 0; j < local; j++) {
    int64_t slice_start = -1, slice_count = 0;
    for (int n = 0; n < nodes; n++) {
      int64_t start, count;
      layout_owned(s, nodes, local, n, j, &start, &count);
      assert_true(count >= 0 && start >= 0 && start + count <= numel);
      for (int64_t i = start; i < start + count; i++) {
        assert_int_equal(owner[i], n * local + j);
        seen[i]++;
      }
      if (slice_start < 0) slice_start = start;
      assert_int_equal(start, slice_start + slice_count); /* pieces of a slice follow each other */
      slice_count += count;
    }
    assert_int_equal(slice_start % width, 0); /* a slice is whole rows */
    assert_int_equal(slice_count % width, 0);
  }
  for (int64_t i = 0; i < numel; i++) assert_int_equal(seen[i], 1);
}

static void every_element_has_one_owner(void **state) {
  (void)state;
  static const int64_t widths[] = {1, 2, 3, 7, 16};
  for (int nodes = 1; nodes <= MAX_NODES; nodes++)
    for (int local = 1; local <= MAX_LOCAL; local++)
      for (int64_t rows = 1; rows <= 40; rows++) {
        ParamSpec s = {.ndim = 1, .dim = {rows, 1}};
        check(&s, nodes, local);
        s.ndim = 2;
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
          s.dim[1] = widths[w];
          check(&s, nodes, local);
        }
      }
}

/* Cut between blocks: every block lies whole with one owner, the same blocks in every grid; owners
 * differ by one block at most. */
static void check_blocks(const ParamSpec *s, int64_t size, int nodes, int local) {
  int64_t width = s->ndim == 2 ? s->dim[1] : s->dim[0],
          numel = s->ndim == 2 ? s->dim[0] * width : width;
  int64_t end = 0, least = INT64_MAX, most = 0, ranks = 0;
  for (int j = 0; j < local; j++)
    for (int n = 0; n < nodes; n++, ranks++) {
      int64_t start, count;
      layout_piece(s, size, nodes, local, n, j, &start, &count);
      assert_int_equal(start, end);
      assert_true(start % width % size == 0 || start == numel);
      end = start + count;
      assert_true(end % width % size == 0 || end == numel);
      if (s->ndim == 1 || local == 1) {
        WireFormat f = {WIRE_INT8, (int)size, DT_F32};
        int64_t blocks = count ? wire_blocks(f, (WireSpan){width, start, count}) : 0;
        least = blocks < least ? blocks : least;
        most = blocks > most ? blocks : most;
      }
    }
  assert_int_equal(end, numel);
  if (local == 1) assert_true(most - least <= 1);
}

static void blocks_have_one_owner(void **state) {
  (void)state;
  static const int64_t widths[] = {1, 2, 7, 16, 100}, sizes[] = {2, 8, 64, 256};
  for (int nodes = 1; nodes <= MAX_NODES; nodes++)
    for (int local = 1; local <= MAX_LOCAL; local++)
      for (int64_t rows = 1; rows <= 40; rows += 3)
        for (int b = 0; b < 4; b++) {
          ParamSpec s = {.ndim = 1, .dim = {rows * 7, 1}};
          check_blocks(&s, sizes[b], nodes, local);
          s = (ParamSpec){.ndim = 2, .dim = {rows, 1}};
          for (int w = 0; w < 5; w++) {
            s.dim[1] = widths[w];
            check_blocks(&s, sizes[b], nodes, local);
          }
        }
}

static void large_sizes_do_not_overflow(void **state) {
  (void)state;
  ParamSpec s = {.ndim = 2, .dim = {1 << 20, 1 << 20}}; /* 2^40 elements */
  int64_t end = 0, total = 0;
  for (int j = 0; j < 24; j++)
    for (int n = 0; n < 3; n++) {
      int64_t start, count;
      layout_owned(&s, 3, 24, n, j, &start, &count);
      assert_int_equal(start, end);
      end = start + count;
      total += count;
    }
  assert_int_equal(total, (int64_t)1 << 40);
}

static void memory_is_planned_for_the_fullest_rank(void **state) {
  (void)state;
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPConfig frozen = {.stage = 3, .trainable = false}, trained = {.stage = 3, .trainable = true};
  for (int nodes = 1; nodes <= MAX_NODES; nodes++)
    for (int local = 1; local <= MAX_LOCAL; local++) {
      ZeroPPMemory f = zeropp_memory(&frozen, specs, TEST_PARAMS, nodes, local, false);
      ZeroPPMemory t = zeropp_memory(&trained, specs, TEST_PARAMS, nodes, local, true);
      for (int r = 0; r < nodes * local && nodes * local > 1; r++) {
        uint64_t owned = 0;
        for (int p = 0; p < TEST_PARAMS; p++) {
          int64_t start, count;
          layout_owned(&specs[p], nodes, local, r / local, r % local, &start, &count);
          owned += (uint64_t)count * 4;
        }
        assert_true(owned <= f.master);
        if (r == 0) assert_int_equal(owned, f.master);
      }
      assert_int_equal(f.moments + f.gradients + f.ema, 0);
      assert_int_equal(t.master, f.master);
      assert_int_equal(t.moments, 2 * t.master);
      assert_int_equal(t.gradients, t.master);
      assert_int_equal(t.ema, t.master);
      assert_int_equal(f.full_units == 0, nodes * local == 1);
    }
}

/* What a device or a number of ranks does not do is refused by the recipe's key. */
static void refusals_name_the_key(void **state) {
  (void)state;
  const ZeroPPConfig plain = {.stage = 3, .trainable = true};
  ZeroPPConfig half = plain, sums = plain, away = plain, delta = plain;
  half.compute = sums.gradients = DT_BF16;
  away.offload = true;
  delta.refresh = REFRESH_DELTA;
  delta.hpz = HPZ_ON;
  const struct {
    ZeroPPConfig cfg;
    DeviceKind device;
    int world;
    const char *says; /* NULL: fine */
  } cases[] = {
      {plain, DEVICE_CPU, 1, NULL},
      {half, DEVICE_CPU, 1, "run.precision"},
      {half, DEVICE_CUDA, 1, NULL},
      {sums, DEVICE_CPU, 2, "zeropp.gradients"},
      {sums, DEVICE_CUDA, 1, "one rank"},
      {sums, DEVICE_CUDA, 2, NULL},
      {away, DEVICE_CPU, 1, "zeropp.offload"},
      {away, DEVICE_CUDA, 1, NULL},
      {delta, DEVICE_CPU, 2, "zeropp.refresh"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Error err = {""};
    int rc = zeropp_check(&cases[i].cfg, cases[i].device, cases[i].world, &err);
    assert_int_equal(rc, cases[i].says ? -1 : 0);
    if (cases[i].says && !strstr(err.msg, cases[i].says)) fail_msg("%s", err.msg);
  }
}

/* Codes of every parameter start where kernels are fastest, in every piece. */
static bool payloads_are_aligned(const ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++)
    for (int k = 0; k < MSG_KINDS; k++) {
      const Message *m = &z->units[i].message[k];
      for (int s = 0; s < z->grid->world * z->units[i].count && m->format.kind > WIRE_BF16; s++)
        if (m->payload[s] % 16) return false;
    }
  return true;
}

/* How many messages a grid has on their way: two reductions where one can travel while the next is
 * written, and one gather more between nodes of GPUs, which have two chains of collectives. */
static void ways_of_a_grid(void **state) {
  (void)state;
  const ZeroPPConfig f32 = {.stage = 3, .trainable = true, .prefetch = 1};
  ZeroPPConfig bf16 = f32, at_once = f32, coded = f32, hpz = f32;
  bf16.compute = coded.compute = hpz.compute = at_once.compute = DT_BF16;
  at_once.prefetch = 0;
  coded.qwz = WIRE_INT8;
  hpz.hpz = HPZ_ON;
  const struct {
    const ZeroPPConfig *cfg;
    int nodes, local, flights, ahead;
    bool direct, keeps_full; /* matrices straight into their places; full weights stay */
  } cases[] = {
      {&f32, 1, 4, 2, 1, false, false},   {&f32, 2, 2, 2, 1, false, false},
      {&bf16, 1, 4, 1, 1, true, false},   {&bf16, 2, 2, 2, 3, false, false},
      {&bf16, 4, 1, 2, 3, false, false},  {&at_once, 2, 2, 2, 0, false, false},
      {&coded, 1, 4, 1, 1, false, false}, {&coded, 2, 2, 2, 3, false, false},
      {&hpz, 1, 4, 1, 1, true, false},    {&hpz, 2, 2, 2, 3, false, false},
      {&hpz, 4, 1, 2, 3, false, true},    {&bf16, 1, 1, 1, 1, false, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Grid g = {
        .world = cases[i].nodes * cases[i].local, .nodes = cases[i].nodes, .local = cases[i].local};
    ParamSpec specs[TEST_PARAMS];
    test_specs(specs);
    ZeroPP z = {
        .grid = &g, .cfg = engine_config(cases[i].cfg), .specs = specs, .n_params = TEST_PARAMS};
    layout_build(&z);
    bool well = z.flights == cases[i].flights && z.ahead == cases[i].ahead &&
                z.direct == cases[i].direct && z.keeps_full == cases[i].keeps_full &&
                payloads_are_aligned(&z);
    layout_free(&z);
    if (!well)
      fail_msg("case %zu: %d flights, %d ahead, direct %d, keeps %d", i, z.flights, z.ahead,
               z.direct, z.keeps_full);
  }
}

/* What GPUs keep and what they do not, by arithmetic. */
static void the_plan_follows_the_types(void **state) {
  (void)state;
  ParamSpec specs[4];
  uint64_t numel = 0;
  for (int u = 0; u < 4; u++) {
    specs[u] = (ParamSpec){
        .unit = u, .ndim = 2, .dim = {1024, 1024}}; /* in BF16, a block that others map */
    snprintf(specs[u].name, sizeof specs[u].name, "%d", u);
    numel += 1024 * 1024;
  }
  ZeroPPConfig c = {.stage = 3, .trainable = true, .compute = DT_BF16};
  ZeroPPMemory one = zeropp_memory(&c, specs, 4, 1, 1, false);
  assert_int_equal(one.master, 4 * numel);
  assert_int_equal(one.moments, 8 * numel);
  assert_int_equal(one.full_units,
                   2 * numel); /* that AdamW writes, and nothing that comes and goes */
  c.offload = true;
  ZeroPPMemory away = zeropp_memory(&c, specs, 4, 1, 1, false);
  assert_true(away.master == 0 && away.moments == 0);
  assert_int_equal(away.host, 12 * numel);
  assert_int_equal(away.full_units, one.full_units);
  c.offload = false;
  c.gradients = DT_BF16;
  ZeroPPMemory two = zeropp_memory(&c, specs, 4, 1, 2, false);
  assert_int_equal(two.gradients, numel); /* 2 bytes, by two ranks */
  /* Two full gradients, one full weight and another beside, one reduction in 4 bytes each way. */
  uint64_t unit = 1024 * 1024;
  assert_int_equal(two.full_units, 2 * 4 * unit + 2 * 2 * unit + 2 * 4 * unit);
  specs[3].dim[1]++; /* weights that others map are a block longer then */
  ZeroPPMemory odd = zeropp_memory(&c, specs, 4, 1, 2, false);
  uint64_t block = 2 << 20, more = 4 * 1024;
  assert_int_equal(odd.full_units - two.full_units, 2 * block + 4 * more);
  specs[3].dim[1]--;
  c.trainable = false;
  c.gradients = DT_F32;
  ZeroPPMemory frozen = zeropp_memory(&c, specs, 4, 1, 1, false);
  assert_true(frozen.master == 0 && frozen.moments == 0 && frozen.gradients == 0);
  assert_int_equal(frozen.full_units, 2 * numel);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(refusals_name_the_key),
    cmocka_unit_test(ways_of_a_grid),
    cmocka_unit_test(the_plan_follows_the_types),
    cmocka_unit_test(every_element_has_one_owner),
    cmocka_unit_test(blocks_have_one_owner),
    cmocka_unit_test(large_sizes_do_not_overflow),
    cmocka_unit_test(memory_is_planned_for_the_fullest_rank),
};
TEST_MAIN(tests)
