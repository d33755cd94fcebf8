/* The scheduler and the page tables without a model: a shadow of the cache remembers which token
 * was written to each slot, so that a page that is lost, given twice, or written while shared
 * shows. */
#include "core/rng.h"
#include "generation/scheduler.h"
#include "tests/test.h"

typedef struct Cell {
  int prompt_id, position;
  int32_t token;
} Cell;

typedef struct Sim {
  KvCache kv;
  Scheduler s;
  Arena *arena;
  int n;
  GenRequest *req;
  GenResult *out;
  int32_t *limits, *prompts;
  Cell *cells;   /* [n_pages * page_size] */
  int *admitted; /* times each request entered */
  int highest;   /* request admitted so far */
  int max_shared, most_rows, prefill_tokens;
  int look, most_steps; /* most steps without a look: asked, and made */
  uint64_t seed;
} Sim;

static void *take(void *ctx, size_t bytes) {
  (void)ctx;
  return aligned_alloc(64, (bytes + 63) / 64 * 64);
}
static void give(void *ctx, void *p) {
  (void)ctx;
  free(p);
}

static unsigned draw(const Sim *m, int stream, int index) {
  return rng_block(m->seed, (uint64_t)stream, (uint64_t)index).v[0];
}

typedef struct Setup {
  int n, longest, max_new, per_prompt, rows, page_size, n_pages, prefill_tokens;
} Setup;

static void sim_open(Sim *m, uint64_t seed, Setup u) {
  *m = (Sim){.n = u.n, .seed = seed, .prefill_tokens = u.prefill_tokens, .highest = -1};
  m->look = 1 + (int)(seed % 4 * 3);
  AttnShape shape = {.n_heads = 1, .n_kv_heads = 1, .head_dim = 1};
  m->arena = arena_create(NULL, take, give);
  m->kv = kv_create(m->arena, shape, DT_F32, 2, u.n_pages, u.page_size);
  m->req = mem_zalloc((size_t)u.n, sizeof *m->req);
  m->out = mem_zalloc((size_t)u.n, sizeof *m->out);
  m->limits = mem_zalloc((size_t)u.n, sizeof *m->limits);
  m->prompts = mem_zalloc((size_t)u.longest, sizeof *m->prompts);
  m->cells = mem_zalloc((size_t)u.n_pages * (size_t)u.page_size, sizeof *m->cells);
  m->admitted = mem_zalloc((size_t)u.n, sizeof *m->admitted);
  for (int i = 0; i < u.n; i++) {
    int id = i / u.per_prompt;
    m->req[i] = (GenRequest){.prompt = m->prompts,
                             .prompt_len = 1 + (int)(draw(m, 1, id) % (unsigned)u.longest),
                             .prompt_id = id,
                             .sample_id = i % u.per_prompt};
    m->limits[i] = m->req[i].prompt_len + 1 + (int)(draw(m, 2, i) % (unsigned)u.max_new);
    m->out[i].tokens = mem_alloc((size_t)u.max_new, sizeof(int32_t));
    m->out[i].logprobs = mem_alloc((size_t)u.max_new, sizeof(float));
  }
  m->s = sched_create(&m->kv, m->req, m->out, m->limits, u.n, NULL, 0, u.rows,
                      (u.longest + u.max_new - 2) / u.page_size + 1);
}

static void sim_close(Sim *m) {
  sched_destroy(&m->s);
  kv_destroy(&m->kv);
  arena_free(m->arena);
  gen_results_free(m->out, m->n);
  free(m->req);
  free(m->out);
  free(m->limits);
  free(m->prompts);
  free(m->cells);
  free(m->admitted);
}

/* Token p of a row, also one that it is yet to draw. */
static int32_t token_of(const Sim *m, const Row *row, int p) {
  if (p < row->len) return sched_token(&m->s, row, p);
  return row->request * 1000 + p - m->req[row->request].prompt_len;
}

/* Only a lead's prefill writes pages with several holders, and only full pages of its prompt. */
static void write_cell(Sim *m, int r, int p, bool may_be_shared) {
  const Row *row = &m->s.rows[r];
  const int32_t *table = sched_table(&m->s, r);
  int page = p / m->kv.page_size;
  assert_true(page < row->n_pages);
  bool full = may_be_shared && (page + 1) * m->kv.page_size <= row->len;
  if (!full) assert_int_equal(m->kv.holders[table[page]], 1);
  m->cells[kv_slot(&m->kv, table, p)] =
      (Cell){m->req[row->request].prompt_id, p, token_of(m, row, p)};
}

/* All that a row's query would read, once so many tokens are there, is its own. */
static void check_row(const Sim *m, int r, int tokens) {
  const Row *row = &m->s.rows[r];
  for (int p = 0; p < tokens; p++) {
    Cell c = m->cells[kv_slot(&m->kv, sched_table(&m->s, r), p)];
    assert_int_equal(c.prompt_id, m->req[row->request].prompt_id);
    assert_int_equal(c.position, p);
    assert_int_equal(c.token, token_of(m, row, p));
  }
}

/* A token that tells request and place apart; one in twelve is an EOS. Whether the row is over. */
static bool append(Sim *m, int r) {
  int request = m->s.rows[r].request, at = m->out[request].n, rows = m->s.n_rows;
  bool eos = draw(m, 1000 + request, at) % 12 == 0;
  sched_append(&m->s, r, request * 1000 + at, 0, eos);
  return m->s.n_rows < rows;
}

static void prefill(Sim *m, int first) {
  Scheduler *s = &m->s;
  int tokens = 0, leads = 0;
  for (int r = first; r < s->n_rows; r++) {
    Row *row = &s->rows[r];
    m->admitted[row->request]++;
    if (m->admitted[row->request] == 1) {
      assert_int_equal(row->request, m->highest + 1); /* in request order */
      m->highest = row->request;
    }
    int from = 0;
    if (row->lead >= 0) {
      assert_int_equal(m->req[s->rows[row->lead].request].prompt_id,
                       m->req[row->request].prompt_id);
      from = row->len / m->kv.page_size * m->kv.page_size;
    } else {
      tokens += row->len;
      leads++;
    }
    for (int p = from; p < row->len; p++) write_cell(m, r, p, row->lead < 0);
    row->lead = -1;
  }
  assert_true(tokens <= m->prefill_tokens || leads == 1);
  for (int r = first; r < s->n_rows; r++) check_row(m, r, s->rows[r].len);
  for (int r = s->n_rows; r-- > first;) append(m, r);
}

/* Steps without a look: all rows draw on behind an EOS, which is thrown away, and to their limit.
 */
static void decode(Sim *m, int steps) {
  Scheduler *s = &m->s;
  for (int i = 0; i < steps; i++) {
    for (int r = 0; r < s->n_rows; r++)
      if (s->rows[r].len + i < s->limits[s->rows[r].request])
        write_cell(m, r, s->rows[r].len + i - 1, false);
    for (int r = 0; r < s->n_rows; r++)
      if (s->rows[r].len + i < s->limits[s->rows[r].request]) check_row(m, r, s->rows[r].len + i);
  }
  for (int r = s->n_rows; r-- > 0;)
    for (int i = 0; i < steps && !append(m, r); i++) continue;
}

static void note(Sim *m) {
  if (m->s.n_rows > m->most_rows) m->most_rows = m->s.n_rows;
  for (int i = 0; i < m->kv.n_pages; i++)
    if (m->kv.holders[i] > m->max_shared) m->max_shared = m->kv.holders[i];
}

static int oldest(const Scheduler *s) {
  int first = INT32_MAX;
  for (int r = 0; r < s->n_rows; r++)
    if (s->rows[r].request < first) first = s->rows[r].request;
  return first;
}

/* Whoever has to leave, it is not the oldest, and nobody who stays is younger than one who left. */
static int make_room(Sim *m) {
  Scheduler *s = &m->s;
  int first = oldest(s), rows = s->n_rows, steps = sched_make_room(s, m->look);
  assert_true(steps >= 1 && steps <= m->look);
  m->most_steps = steps > m->most_steps ? steps : m->most_steps;
  assert_int_equal(oldest(s), first);
  for (int r = 0; r < s->n_rows && s->n_rows < rows; r++)
    assert_true(s->rows[r].request < s->waiting[s->n_waiting - 1]);
  return steps;
}

static void run(Sim *m) {
  Scheduler *s = &m->s;
  while (s->n_waiting > 0 || s->n_rows > 0) {
    for (int fresh; (fresh = sched_admit(s, m->prefill_tokens)) > 0;) {
      note(m);
      prefill(m, s->n_rows - fresh);
    }
    int steps = make_room(m);
    assert_true(s->n_rows <= s->max_rows && s->n_rows + s->n_waiting <= m->n);
    if (s->n_rows > 0) decode(m, steps);
  }
  assert_int_equal(m->kv.n_free, m->kv.n_pages);
  for (int i = 0; i < m->n; i++) {
    const GenResult *r = &m->out[i];
    assert_true(r->n > 0 && (r->ended || m->req[i].prompt_len + r->n == m->limits[i]));
    for (int t = 0; t < r->n; t++) assert_int_equal(r->tokens[t], i * 1000 + t);
  }
}

static int returned(const Sim *m) {
  int n = 0;
  for (int i = 0; i < m->n; i++) n += m->admitted[i] > 1;
  return n;
}

static void test_roomy(void **state) {
  (void)state;
  Setup u = {60, 40, 30, 1, 16, 4, 16 * 18, 100};
  Sim m;
  sim_open(&m, 1, u);
  run(&m);
  assert_int_equal(m.most_rows, 16);
  assert_int_equal(returned(&m), 0); /* nobody has to leave */
  assert_int_equal(m.max_shared, 1);
  sim_close(&m);
}

static void test_tight(void **state) {
  (void)state;
  int back = 0, most_steps = 0;
  for (uint64_t seed = 0; seed < 40; seed++) {
    int page = 1 + (int)(seed % 7), pages = 70 / page + 1 + (int)(seed % 5);
    Setup u = {40, 40, 30, 1, 12, page, pages, 1 + 13 * (int)(seed % 6)};
    Sim m;
    sim_open(&m, seed, u);
    run(&m);
    back += returned(&m);
    most_steps = m.most_steps > most_steps ? m.most_steps : most_steps;
    sim_close(&m);
  }
  assert_true(back > 100); /* pages did run out, and all came to their end */
  assert_int_equal(most_steps, 10);
}

static void test_shared_prompts(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    int page = 1 + (int)(seed % 9);
    Setup u = {48, 40, 30, 4, 16, page, 300 / page + (int)(seed % 3), 200};
    Sim m;
    sim_open(&m, seed, u);
    run(&m);
    assert_int_equal(m.max_shared, 4);
    sim_close(&m);
  }
}

static void test_one_row(void **state) {
  (void)state;
  Setup u = {20, 10, 9, 3, 1, 3, 6, 1};
  Sim m;
  sim_open(&m, 3, u);
  run(&m);
  assert_int_equal(m.most_rows, 1);
  sim_close(&m);
}

/* As many steps as there are pages for; never a page behind a limit. */
static void test_room_ahead(void **state) {
  (void)state;
  Setup u = {2, 1, 20, 1, 2, 2, 14, 10};
  Sim m;
  sim_open(&m, 1, u);
  m.limits[0] = m.limits[1] = 12;
  assert_int_equal(sched_admit(&m.s, 10), 2);
  for (int r = 0; r < 2; r++) m.s.rows[r].len = 2;
  assert_int_equal(sched_make_room(&m.s, 1), 1); /* 2 tokens: one page each */
  assert_int_equal(m.kv.n_free, 12);
  assert_int_equal(sched_make_room(&m.s, 2), 2); /* 3 tokens */
  assert_int_equal(m.kv.n_free, 10);
  assert_int_equal(sched_make_room(&m.s, 100), 100); /* 11 tokens are all that is ever cached */
  assert_int_equal(m.kv.n_free, 2);
  m.limits[0] = m.limits[1] = 100;
  assert_int_equal(sched_make_room(&m.s, 23),
                   11); /* 24 tokens each want 12 more pages, 12 want 0 */
  assert_int_equal(m.kv.n_free, 2);
  for (int r = 2; r-- > 0;) kv_drop(&m.kv, sched_table(&m.s, r), m.s.rows[r].n_pages);
  sim_close(&m);
}

/* Who enters leaves a page to each row that will want one, and so drives none of them out again. */
static void test_a_page_is_left_to_who_grows(void **state) {
  (void)state;
  Setup u = {4, 1, 9, 1, 4, 1, 5, 10};
  Sim m;
  sim_open(&m, 1, u);
  for (int i = 0; i < 4; i++) m.limits[i] = 4;
  assert_int_equal(sched_admit(&m.s, 10), 3); /* for the fourth two are free, three would grow */
  assert_int_equal(sched_admit(&m.s, 10), 0);
  m.limits[0] = m.limits[1] = 2; /* the last token is never cached */
  assert_int_equal(sched_admit(&m.s, 10), 1);
  for (int r = 4; r-- > 0;) kv_drop(&m.kv, sched_table(&m.s, r), m.s.rows[r].n_pages);
  sim_close(&m);
}

/* A page that is free again is the next to be used. */
static void test_pages_come_back_at_once(void **state) {
  (void)state;
  Setup u = {3, 1, 2, 1, 3, 1, 9, 10};
  Sim m;
  sim_open(&m, 1, u);
  int32_t a[4], b[4];
  int na = 0, nb = 0;
  assert_true(kv_grow(&m.kv, a, &na, 4));
  assert_true(kv_grow(&m.kv, b, &nb, 4));
  assert_false(kv_grow(&m.kv, a, &na, 6)); /* 2 more, 1 left */
  assert_int_equal(na, 4);
  assert_int_equal(m.kv.n_free, 1);
  kv_drop(&m.kv, a, na);
  int32_t c[4];
  int nc = 0;
  assert_true(kv_grow(&m.kv, c, &nc, 4));
  assert_memory_equal(a, c, sizeof a);
  kv_drop(&m.kv, b, nb);
  kv_drop(&m.kv, c, nc);
  assert_int_equal(m.kv.n_free, 9);
  sim_close(&m);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_roomy),
    cmocka_unit_test(test_tight),
    cmocka_unit_test(test_shared_prompts),
    cmocka_unit_test(test_one_row),
    cmocka_unit_test(test_room_ahead),
    cmocka_unit_test(test_a_page_is_left_to_who_grows),
    cmocka_unit_test(test_pages_come_back_at_once),
};
TEST_MAIN(tests)
