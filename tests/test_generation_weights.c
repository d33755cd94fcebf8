/* Where a rollout's weights lie, in which format, and what the ranks of a node do together: the
 * tokens are those of one sequence at a time on a whole replica, and with hpZ nothing comes from
 * another node.
 * ranks: 1 2 3 4 */
#include "generation/generation.h"
#include "tests/generation_test.h"

enum { N = 8, NEW = 9, VOCAB = 97 };

static const struct Kind {
  const char *name;
  RolloutWeights weights;
  WireKind format;
} kinds[] = {{"replica", ROLLOUT_REPLICA, WIRE_F32},
             {"tensor parallel", ROLLOUT_TENSOR_PARALLEL, WIRE_F32},
             {"stream", ROLLOUT_STREAM, WIRE_F32},
             {"replica, int8", ROLLOUT_REPLICA, WIRE_INT8},
             {"tensor parallel, int8", ROLLOUT_TENSOR_PARALLEL, WIRE_INT8},
             {"stream, int8", ROLLOUT_STREAM, WIRE_INT8},
             {"replica, fp8", ROLLOUT_REPLICA, WIRE_FP8},
             {"tensor parallel, fp8", ROLLOUT_TENSOR_PARALLEL, WIRE_FP8},
             {"stream, fp8", ROLLOUT_STREAM, WIRE_FP8}};
enum { FULL_KINDS = 3, KINDS = sizeof kinds / sizeof *kinds };

static const struct Way {
  int look, batch, page, kv, prefill, min_new;
} ways[] = {{1, 0, 0, 0, 0, 0}, {4, 3, 5, 0, 20, 0}, {8, 4, 2, 60, 1, 0}, {3, 2, 16, 0, 0, 3}};
enum { WAYS = sizeof ways / sizeof *ways };

static GenParams params(const struct Way *w, bool greedy) {
  return (GenParams){.sample = {.temperature = 1.2f,
                                .top_p = greedy ? 1 : 0.95f,
                                .repetition_penalty = w->min_new ? 1.3f : 1,
                                .greedy = greedy},
                     .keep = !greedy && w->look > 1,
                     .max_new_tokens = NEW,
                     .min_new_tokens = w->min_new,
                     .n_eos = 3,
                     .eos_ids = {3, 14, 15},
                     .seed = 7,
                     .max_batch = w->batch,
                     .page_size = w->page,
                     .max_kv_tokens = w->kv,
                     .prefill_tokens = w->prefill,
                     .look = w->look};
}

static World open_world(int ranks_per_node, ModelConfig c, ZeroPPConfig zero) {
  Error err = {""};
  World w = {.device = device_open(DEVICE_CPU, 1, &err), .grid = grid_create(ranks_per_node, &err)};
  if (!w.device || !w.grid) fail_msg("%s", err.msg);
  w.arena = arena_create(w.device, world_take, world_give);
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = 9, .zero = zero};
  w.model = model_create(w.device, w.grid, w.arena, &c, &o);
  return w;
}

/* Every rank generates for some of the requests, the last one for most; what it got is what one
 * rank makes of them one at a time. Returns the bytes from other nodes. */
static uint64_t expect_tokens(World *w, GenParams p, const GenRequest *req, const GenResult *want,
                              const char *what) {
  const Grid *g = w->grid;
  GenRequest mine[N];
  GenResult out[N];
  GenStats stats;
  Error err = {""};
  int at[N], n = 0;
  for (int i = 0; i < N; i++) {
    int owner = i % 3 == 0 ? i / 3 % g->world : g->world - 1;
    if (owner == g->rank) mine[n] = req[i], at[n++] = i;
  }
  if (generate(w->model, &p, mine, n, out, &stats, &err)) fail_msg("%s: %s", what, err.msg);
  for (int k = 0; k < n; k++) {
    if (out[k].n != want[at[k]].n ||
        memcmp(out[k].tokens, want[at[k]].tokens, (size_t)out[k].n * sizeof(int32_t)) != 0)
      print_error("%s: request %d differs\n", what, at[k]);
    expect_same(&out[k], &want[at[k]]);
    if (p.keep)
      assert_memory_equal(out[k].kept, want[at[k]].kept, (size_t)out[k].n * ((VOCAB + 7) / 8));
  }
  gen_results_free(out, n);
  return stats.inter_bytes;
}

static GenResult *one_at_a_time(World *w, GenParams p, const GenRequest *req) {
  p.max_batch = 1;
  p.look = 1;
  p.max_kv_tokens = p.prefill_tokens = 0;
  return generate_ok(w, &p, req, N);
}

static bool is_codes_of(const ZeroPPConfig *zero, WireKind format) {
  return format == WIRE_F32 || (zero->qwz == format && zero->hpz != HPZ_ON);
}

/* All kinds that compute with training's numbers; with hpZ in all ways, else in every second one.
 */
static void expect_all_kinds(World *w, const ZeroPPConfig *zero, const GenRequest *req,
                             const char *name) {
  bool some = zero->hpz != HPZ_ON || zero->qwz;
  for (int k = some && zero->qwz; k < WAYS; k += some ? 2 : 1) {
    GenParams p = params(&ways[k], k % 2 == 1);
    GenResult *want = one_at_a_time(w, p, req);
    for (int i = 0; i < KINDS; i++) {
      if (!is_codes_of(zero, kinds[i].format)) continue;
      char what[160];
      snprintf(what, sizeof what, "%s, %s, way %d", name, kinds[i].name, k);
      p.weights = kinds[i].weights;
      p.format = kinds[i].format;
      uint64_t bytes = expect_tokens(w, p, req, want, what);
      if (zero->hpz && bytes > 0) fail_msg("%s: %d bytes from other nodes", what, (int)bytes);
      bool crosses = !zero->hpz && w->grid->nodes > 1 && p.weights == ROLLOUT_STREAM;
      if (crosses) assert_true(zero->stage == 3 ? bytes > 0 : bytes == 0); /* below, weights stay */
    }
    free_results(want, N);
  }
}

static const struct Engine {
  const char *name;
  ZeroPPConfig zero;
} engines[] = {
    {"ZeRO-3", {.stage = 3}},
    {"ZeRO-1", {.stage = 1, .wire = WIRE_BF16}},
    {"hpZ", {.stage = 3, .wire = WIRE_BF16, .hpz = HPZ_ON, .prefetch = 1}},
    {"hpZ in float32", {.stage = 3, .hpz = HPZ_ON}}, /* slices of a node are read in place */
    {"int8 secondary", {.stage = 3, .qwz = WIRE_INT8, .hpz = HPZ_QUANTIZED, .block = 64}},
    {"fp8 secondary",
     {.stage = 3,
      .qwz = WIRE_FP8,
      .hpz = HPZ_QUANTIZED,
      .block = 64,
      .scale = DT_BF16,
      .prefetch = 2}},
    {"int8 on the wire", {.stage = 3, .wire = WIRE_BF16, .qwz = WIRE_INT8, .hpz = HPZ_ON}},
};
enum { ENGINES = sizeof engines / sizeof *engines };

static void test_tokens(void **state) {
  (void)state;
  int world = launch_world();
  GenRequest *req = make_requests(N, 30, 2, VOCAB);
  for (int local = 1; local <= world; local++) {
    if (world % local != 0 || (world == 4 && local != 2)) continue;
    for (int e = 0; e < ENGINES; e++) {
      World w = open_world(local, tiny_config(), engines[e].zero);
      expect_all_kinds(&w, &engines[e].zero, req, engines[e].name);
      world_close(&w);
    }
  }
  free_requests(req, N);
}

/* Matrices, but for the embedding, become what their codes stand for. On one node a rank's part of
 * a matrix is whole rows. */
static void round_masters(World *w, WireFormat f) {
  ZeroPP *z = model_zero(w->model);
  const Ops *op = device_ops(w->device);
  for (int p = 1; p < zeropp_n_params(z); p++) {
    const ParamSpec *s = zeropp_spec(z, p);
    int64_t start, count;
    float *x = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    if (s->ndim != 2 || count == 0) continue;
    WirePart part = {.span = {s->dim[1], 0, count}, .x = tensor_1d(x, DT_F32, count)};
    part.to = (WireData){mem_alloc(wire_scale_bytes(f, part.span), 1),
                         mem_alloc(wire_payload_bytes(f, part.span), 1), 1, 0};
    part.from = part.to;
    op->quantize(w->device, f, 1, &part);
    op->dequantize(w->device, f, 1, &part, false);
    free(part.to.scales);
    free(part.to.payload);
  }
  zeropp_weights_written(z);
}

/* Where training's weights are no codes, a rollout makes them, out of the rows that it holds. */
static void test_codes_of_a_rollout(void **state) {
  (void)state;
  GenRequest *req = make_requests(N, 30, 1, VOCAB);
  const WireFormat formats[] = {{WIRE_INT8, 64, DT_F32}, {WIRE_FP8, 128, DT_BF16}};
  for (int f = 0; f < 2; f++) {
    GenParams p = params(&ways[1], true);
    ZeroPPConfig zero = {.stage = 3, .block = formats[f].block, .scale = formats[f].scale};
    World w = open_world(launch_world(), tiny_config(), zero);
    round_masters(&w, formats[f]);
    GenResult *want = one_at_a_time(&w, p, req);
    world_close(&w);
    w = open_world(launch_world() == 4 ? 2 : 0, tiny_config(), zero);
    p.format = formats[f].kind;
    expect_tokens(&w, p, req, want, "codes of a replica");
    p.weights = ROLLOUT_TENSOR_PARALLEL;
    expect_tokens(&w, p, req, want, "codes of slices");
    world_close(&w);
    free_results(want, N);
  }
  free_requests(req, N);
}

/* A rollout of new weights, and writes while one is under way. */
static void test_new_weights(void **state) {
  (void)state;
  GenRequest *req = make_requests(N, 20, 1, VOCAB);
  World w = open_world(launch_world() == 4 ? 2 : 0, tiny_config(), engines[4].zero);
  GenParams p = params(&ways[0], true);
  for (int step = 0; step < 2; step++) {
    p.weights = ROLLOUT_REPLICA;
    p.format = WIRE_F32;
    GenResult *want = one_at_a_time(&w, p, req);
    for (int i = 3; i < 6; i++) {
      p.weights = kinds[i].weights;
      p.format = kinds[i].format;
      expect_tokens(&w, p, req, want, kinds[i].name);
    }
    free_results(want, N);
    zeropp_init_random(model_zero(w.model), 77);
  }
  free_requests(req, N);
  world_close(&w);
}

/* Only the first node generates. What is gathered for that all nodes gather, and it takes nothing
 * from them: gathers that follow are still the same calls on all ranks. */
static void test_nodes_without_requests(void **state) {
  (void)state;
  GenRequest *req = make_requests(N, 20, 1, VOCAB);
  Error err = {""};
  for (int stage = 0; stage <= 3; stage++)
    for (int k = 0; k < 5; k++) {
      ZeroPPConfig zero = {
          .stage = stage, .block = 64, .hpz = stage == 3 && k % 2 ? HPZ_ON : HPZ_OFF};
      World w = open_world(launch_world() == 4 ? 2 : 1, tiny_config(), zero);
      GenParams p = params(&ways[0], true);
      GenResult out[N];
      p.weights = kinds[k].weights;
      p.format = kinds[k].format;
      int n = w.grid->node == 0 ? N : 0;
      for (int twice = 0; twice < 2; twice++) {
        if (generate(w.model, &p, req, n, out, NULL, &err))
          fail_msg("%s: %s", kinds[k].name, err.msg);
        gen_results_free(out, n);
      }
      ZeroPP *z = model_zero(w.model);
      zeropp_gather_all(z);
      zeropp_release_all(z);
      world_close(&w);
    }
  free_requests(req, N);
}

/* One rank begins with nearly all requests of its node; the others take what waits. Twice: the same
 * bits, since nothing goes by the clock. */
static void test_shared_requests(void **state) {
  (void)state;
  enum { MANY = 40 };
  GenRequest *req = make_requests(MANY, 20, 2, VOCAB);
  World w = open_world(launch_world() == 4 ? 2 : 0, tiny_config(), (ZeroPPConfig){.stage = 3});
  const Grid *g = w.grid;
  GenParams p = params(&ways[1], false);
  p.max_new_tokens = 50;
  GenResult *want = mem_zalloc(MANY, sizeof *want), *first = mem_zalloc(MANY, sizeof *first);
  Error err = {""};
  assert_int_equal(generate(w.model, &p, req, MANY, want, NULL, &err), 0);
  for (int k = 0; k < 4; k++) {
    int32_t owner[MANY];
    int before = 0, own = 0;
    GenStats stats;
    GenResult out[MANY];
    for (int i = 0; i < MANY; i++) owner[i] = i == 7 ? 0 : g->local - 1;
    p.owner = owner;
    p.weights = k < 3 ? ROLLOUT_REPLICA : ROLLOUT_TENSOR_PARALLEL;
    p.look = k < 2 ? 1 : 4;
    assert_int_equal(generate(w.model, &p, req, MANY, out, &stats, &err), 0);
    for (int i = 0; i < MANY; i++) {
      before += i == 7 ? g->local_rank == 0 : g->local_rank == g->local - 1;
      own += owner[i] == g->local_rank;
      if (owner[i] != g->local_rank) {
        assert_null(out[i].tokens);
        continue;
      }
      expect_same(&out[i], &want[i]);
      if (k == 1 && first[i].tokens)
        assert_memory_equal(out[i].logprobs, first[i].logprobs,
                            (size_t)out[i].n * sizeof *out[i].logprobs);
    }
    if (k == 1) /* the same ranks had the same requests */
      for (int i = 0; i < MANY; i++) assert_int_equal(owner[i] == g->local_rank, first[i].n > 0);
    if (k < 3) assert_in_range(own, MANY / g->local / 3, MANY / g->local * 2);
    if (k == 3) assert_int_equal(own, before); /* all step together anyway */
    if (k == 0)
      memcpy(first, out, sizeof out);
    else
      gen_results_free(out, MANY);
  }
  free_results(first, MANY);
  free_results(want, MANY);
  free_requests(req, MANY);
  world_close(&w);
}

/* An error of one rank ends those that share requests with it. */
static void test_error_among_sharers(void **state) {
  (void)state;
  GenRequest *req = make_requests(30, 20, 1, VOCAB);
  World w = open_world(0, tiny_config(), (ZeroPPConfig){.stage = 3});
  int64_t start, count;
  float *x = zeropp_shard(model_zero(w.model), STATE_MASTER, 1, &start, &count);
  for (int64_t i = 0; i < count; i++) x[i] = NAN;
  zeropp_weights_written(model_zero(w.model));
  int32_t owner[30];
  for (int i = 0; i < 30; i++) owner[i] = i % w.grid->local;
  GenParams p = params(&ways[1], false);
  p.owner = owner;
  GenResult out[30];
  Error err = {""};
  assert_int_equal(generate(w.model, &p, req, 30, out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "NaN"));
  free_requests(req, 30);
  world_close(&w);
}

static void test_refusals(void **state) {
  (void)state;
  GenRequest *req = make_requests(1, 5, 1, VOCAB);
  GenResult out;
  Error err = {""};
  World w = open_world(0, tiny_config(), (ZeroPPConfig){.stage = 3, .block = 96});
  GenParams p = params(&ways[0], true);
  p.format = WIRE_INT8;
  assert_int_equal(generate(w.model, &p, req, 1, &out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "blocks of 96 (zeropp.block)"));
  world_close(&w);
  ModelConfig odd = tiny_config();
  odd.hidden = 44;
  odd.n_heads = 3;
  odd.n_kv_heads = 1;
  odd.head_dim = 14;
  odd.ffn = 50;
  w = open_world(0, odd, (ZeroPPConfig){.stage = 3});
  assert_int_equal(generate(w.model, &p, req, 1, &out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "none of the 22 matrices"));
  world_close(&w);
  w = open_world(0, tiny_config(), (ZeroPPConfig){.stage = 3});
  p.weights = ROLLOUT_STREAM;
  assert_int_equal(generate(w.model, &p, req, 1, &out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "weights that stream"));
  free_requests(req, 1);
  world_close(&w);
}

/* An error of one rank in the middle ends all that step together, with its message. */
static void test_error_of_one_rank(void **state) {
  (void)state;
  GenRequest *req = make_requests(4, 20, 1, VOCAB);
  World w = open_world(0, tiny_config(), (ZeroPPConfig){.stage = 3});
  int last = w.grid->world - 1;
  int64_t start, count;
  int token = 5, embedding = zeropp_find(model_zero(w.model), "model.embed_tokens.weight");
  float *x = zeropp_shard(model_zero(w.model), STATE_MASTER, embedding, &start, &count);
  for (int64_t i = 0; i < count; i++)
    if ((start + i) / 48 == token) x[i] = NAN; /* whoever reads this token finds no number */
  zeropp_weights_written(model_zero(w.model));
  for (int i = 0; i < 4; i++)
    for (int t = 0; t < req[i].prompt_len; t++) {
      int32_t *at = (int32_t *)req[i].prompt + t;
      *at = *at == token ? 6 : *at;
      if (w.grid->rank == last && i == 2) *at = token;
    }
  for (int k = 1; k < FULL_KINDS; k++) {
    GenResult out[4];
    Error err = {""};
    GenParams p = params(&ways[0], false);
    p.weights = kinds[k].weights;
    p.n_eos = 0;
    p.sample.temperature = 0.01f; /* nobody draws the token but of NaN */
    assert_int_equal(generate(w.model, &p, req, 4, out, NULL, &err), -1);
    assert_non_null(strstr(err.msg, "request 2"));
    for (int i = 0; i < 4; i++) assert_null(out[i].tokens);
  }
  free_requests(req, 4);
  world_close(&w);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_tokens),          cmocka_unit_test(test_codes_of_a_rollout),
    cmocka_unit_test(test_new_weights),     cmocka_unit_test(test_nodes_without_requests),
    cmocka_unit_test(test_shared_requests), cmocka_unit_test(test_error_among_sharers),
    cmocka_unit_test(test_refusals),        cmocka_unit_test(test_error_of_one_rank),
};
TEST_MAIN(tests)
