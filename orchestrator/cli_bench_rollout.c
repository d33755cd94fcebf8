/* rlhf bench rollout: answers to random prompts by random weights, prefill and decode apart.
 *
 * No EOS is drawn: random weights draw all ids alike. With --lengths eos every answer has a limit
 * of its own instead, at random; the rows it leaves are filled in the same way. What that costs
 * shows beside answers of one length with as many sequences in flight (--lengths compare). */
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "orchestrator/cli_bench.h"

enum { SHORTEST = 16, LONGEST = 1024, MOST_ROWS = 256 };

typedef struct RolloutBench {
  const char *name;
  ModelConfig config;
  BenchRig rig;
  GenParams kind;  /* of weights */
  BenchMode *mode; /* of the engine; NULL: stage 3 alone */
  int prompts, length, response, rows, look, runs;
  bool eos;         /* lengths at random */
  bool compare;     /* then again with fixed ones */
  int n;            /* prompts of this node, which its ranks share */
  GenRequest *own;  /* [n] */
  int32_t *lengths; /* [n] */
  int32_t *owner;   /* [n] the local rank that each begins with */
} RolloutBench;

/* Of all ranks: tokens are sums, times and bytes of a rank are the most. */
typedef struct RolloutFigures {
  double prompt_tokens, generated, drawn, steps, step_rows, cached;
  double all, prefill, decode, gather, peak;
  double inter_bytes; /* from other nodes, of all ranks */
  double least_busy;  /* of the rank that was: its share of `all` in which it ran steps */
  double answers;     /* a number that two sets of answers share only where they are equal */
} RolloutFigures;

/* ---- requests ---- */

static int32_t random_length(const RolloutBench *b, int prompt) {
  int room = b->config.max_positions - b->length;
  int longest = room < LONGEST ? room : LONGEST;
  return SHORTEST + (int32_t)(rng_uniform(3, 1, (uint64_t)prompt) * (longest - SHORTEST + 1));
}

static void fill_requests(RolloutBench *b, const int32_t *tokens) {
  const Grid *g = b->rig.grid;
  b->n = 0;
  b->own = mem_alloc((size_t)b->prompts, sizeof *b->own);
  b->lengths = mem_alloc((size_t)b->prompts, sizeof *b->lengths);
  b->owner = mem_alloc((size_t)b->prompts, sizeof *b->owner);
  for (int i = 0; i < b->prompts; i++) {
    int rank = i % g->world;
    if (rank / g->local != g->node) continue;
    b->owner[b->n] = rank % g->local;
    b->own[b->n] = (GenRequest){.prompt = tokens + (int64_t)i * b->length,
                                .prompt_len = b->length,
                                .prompt_id = i,
                                .sample_id = 0};
    b->lengths[b->n++] = b->eos ? random_length(b, i) : b->response;
  }
}

static GenParams params(const RolloutBench *b) {
  int world = b->rig.grid->world, share = (b->prompts + world - 1) / world;
  int rows = share < MOST_ROWS ? share : MOST_ROWS;
  return (GenParams){.sample = {.temperature = 1, .top_p = 1},
                     .max_new_tokens = b->eos ? LONGEST : b->response,
                     .max_new_of = b->lengths,
                     .seed = 5,
                     .max_batch = b->rows ? b->rows : rows,
                     .weights = b->kind.weights,
                     .format = b->kind.format,
                     .look = b->look};
}

/* ---- a rollout ---- */

/* Of 32 bits a sequence, whose sum does not depend on who answered which. */
static double sum_of_answers(const RolloutBench *b, const GenResult *out) {
  double sum = 0;
  for (int i = 0; i < b->n; i++) {
    uint64_t h = (uint64_t)b->own[i].prompt_id;
    for (int t = 0; t < out[i].n; t++)
      h = rng_block(h, (uint64_t)out[i].tokens[t], (uint64_t)t).v[0];
    if (out[i].n > 0) sum += (double)(uint32_t)h;
  }
  return sum;
}

static RolloutFigures figures(const RolloutBench *b, const GenStats *s, const GenResult *out,
                              double all) {
  double sum[] = {(double)s->prompt_tokens, (double)s->generated_tokens, (double)s->drawn_rows,
                  (double)s->step_rows,     (double)s->cached_tokens,    (double)s->decode_steps,
                  (double)s->inter_bytes,   sum_of_answers(b, out)};
  double idle = 1 - (s->prefill_seconds + s->decode_seconds + s->gather_seconds) / all;
  double most[] = {all,
                   s->prefill_seconds,
                   s->decode_seconds,
                   s->gather_seconds,
                   (double)device_peak_bytes(b->rig.device),
                   idle};
  comm_all_reduce_f64(b->rig.grid->all, sum, 8, false);
  comm_all_reduce_f64(b->rig.grid->all, most, 6, true);
  return (RolloutFigures){.prompt_tokens = sum[0],
                          .generated = sum[1],
                          .drawn = sum[2],
                          .step_rows = sum[3],
                          .cached = sum[4],
                          .steps = sum[5],
                          .all = most[0],
                          .prefill = most[1],
                          .decode = most[2],
                          .gather = most[3],
                          .peak = most[4],
                          .inter_bytes = sum[6],
                          .answers = sum[7],
                          .least_busy = 1 - most[5]};
}

static int roll_out(RolloutBench *b, Model *m, RolloutFigures *f, Error *err) {
  GenParams p = params(b);
  GenResult *out = mem_zalloc((size_t)b->prompts, sizeof *out);
  GenStats stats;
  p.owner = mem_alloc((size_t)b->n, sizeof *p.owner);
  memcpy(p.owner, b->owner, (size_t)b->n * sizeof *p.owner);
  comm_barrier(b->rig.grid->all);
  device_sync(b->rig.device);
  device_reset_peak(b->rig.device);
  double start = clock_seconds();
  int rc = generate(m, &p, b->own, b->n, out, &stats, err);
  double all = clock_seconds() - start;
  if (rc == 0) *f = figures(b, &stats, out, all);
  gen_results_free(out, b->n);
  free(out);
  free(p.owner);
  return rc;
}

/* The first is not measured: it measures plans, and the arena becomes one piece behind it. All draw
 * with the same random numbers. */
static int best_of_runs(RolloutBench *b, Model *m, RolloutFigures *best, Error *err) {
  double answers = 0;
  for (int r = 0; r <= b->runs; r++) {
    RolloutFigures f;
    if (roll_out(b, m, &f, err)) return -1;
    if (r == 0) answers = f.answers;
    if (f.answers != answers)
      return error_set(err, "run %d of the same rollout gave other answers than run 0", r);
    if (r <= 1 || f.all < best->all) *best = f;
  }
  return 0;
}

/* ---- the table ---- */

static ZeroPPConfig engine_of(const RolloutBench *b) {
  ZeroPPConfig zero = {.stage = 3, .wire = b->rig.compute == DT_BF16 ? WIRE_BF16 : WIRE_F32};
  if (b->mode) zero = b->mode->zero;
  zero.compute = b->rig.compute;
  return zero;
}

/* What every step of a rank reads of the weights: of an embedding of its own only a few rows, in
 * tensor parallel a part, in codes a byte and a share of a scale (of those that are coded). */
static double weight_bytes(const RolloutBench *b) {
  const ModelConfig *c = &b->config;
  ZeroPPConfig zero = engine_of(b);
  double params = (double)model_config_params(c, HEAD_LM), size = (double)dtype_size(zero.compute);
  double table = (double)(c->embed_dim ? c->embed_dim : c->hidden) * c->vocab_size;
  double local = b->kind.weights == ROLLOUT_TENSOR_PARALLEL ? b->rig.grid->local : 1;
  if (b->kind.format == WIRE_F32 || b->kind.weights == ROLLOUT_STREAM)
    return (c->tied_head ? params : params - table) * size / local;
  double held = (double)model_rollout_bytes(c, &zero, b->rig.grid->nodes, b->rig.grid->local,
                                            b->kind.weights, b->kind.format);
  return c->tied_head ? held - table * size * (1 - 1 / local) : held - table * size;
}

static double token_bytes(const RolloutBench *b) {
  const ModelConfig *c = &b->config;
  return 2.0 * c->n_layers * c->n_kv_heads * c->head_dim * (double)dtype_size(b->rig.compute);
}

static void print_row(const char *name, double seconds, double tokens) {
  printf("%-8s %10.2f %10.0f %10.0f\n", name, seconds * 1e3, tokens,
         seconds > 0 ? tokens / seconds : 0);
}

static void print_figures(const RolloutBench *b, const RolloutFigures *f, double copy_rate) {
  const double gib = 1024.0 * 1024 * 1024;
  double world = b->rig.grid->world, cached = f->cached * token_bytes(b);
  printf("\n%-8s %10s %10s %10s\n", "phase", "ms", "tokens", "tok/s");
  print_row("prefill", f->prefill, f->prompt_tokens);
  print_row("decode", f->decode, f->drawn);
  print_row("all", f->all, f->generated);
  if (f->steps > 0) {
    double step = f->decode * world / f->steps;
    double weights = weight_bytes(b), cache = cached / f->steps;
    printf(
        "a rank decodes in %.0f steps of %.1f rows, %.1f %% of which draw: %.1f sequences in "
        "flight, which attend to %.0f tokens\n",
        f->steps / world, f->step_rows / f->steps, 100 * f->drawn / f->step_rows,
        f->drawn / f->steps, f->cached / f->drawn);
    printf(
        "a step takes %.3f ms and reads %.4f GB of weights and %.4f GB of cache: %.3f TB/s, "
        "%.1f %% of the copy rate of %.3f\n",
        step * 1e3, weights / 1e9, cache / 1e9, (weights + cache) / step / 1e12,
        100 * (weights + cache) / step / copy_rate, copy_rate / 1e12);
  }
  printf("%.3f s in all, gathering weights %.3f; %.2f GiB of a rank at most\n", f->all, f->gather,
         f->peak / gib);
  if (b->rig.grid->world > 1)
    printf("%.0f bytes from other nodes; the rank that waited most was busy for %.1f %%\n",
           f->inter_bytes, 100 * f->least_busy);
}

static void print_head(const RolloutBench *b) {
  GenParams p = params(b);
  char lengths[64];
  snprintf(lengths, sizeof lengths, b->eos ? "%d to %d at random" : "%d",
           b->eos ? SHORTEST : b->response, LONGEST);
  printf(
      "%s, %.2f million parameters; %d prompts of %d tokens, answers of %s; %s, %s; %s, matrices "
      "%s; a look every %d steps\n",
      b->name, (double)model_config_params(&b->config, HEAD_LM) / 1e6, b->prompts, b->length,
      lengths, device_describe(b->rig.device), dtype_name(b->rig.compute),
      rollout_weights_name(b->kind.weights),
      b->kind.format == WIRE_F32    ? "full"
      : b->kind.format == WIRE_INT8 ? "int8"
                                    : "fp8",
      gen_look(&p, device_kind(b->rig.device)));
}

/* ---- the command ---- */

/* One kind of lengths. */
static int measure_lengths(RolloutBench *b, Model *m, double copy_rate, RolloutFigures *f,
                           Error *err) {
  bool root = b->rig.grid->rank == 0;
  Tokens drawn = tokens_draw(&b->config, b->prompts, b->prompts * b->length, 77);
  fill_requests(b, drawn.tokens);
  if (root) print_head(b);
  int rc = best_of_runs(b, m, f, err);
  if (rc == 0 && root) print_figures(b, f, copy_rate);
  tokens_free(&drawn);
  free(b->own);
  free(b->lengths);
  free(b->owner);
  return rc;
}

static int rounded(double x) { return x < 1 ? 1 : (int)(x + 0.5); }

/* Answers of one length with as many sequences in flight, and about as many tokens in all: full
 * rows from the first step to the last, so their number is that mean. */
static void fix_lengths(RolloutBench *b, const RolloutFigures *f) {
  int ranks = b->rig.grid->world, share = b->prompts / ranks;
  int rows = rounded(f->drawn / f->steps), waves = rounded((double)share / rows);
  int room = b->config.max_positions - b->length;
  int response = rounded(f->generated / ((double)ranks * rows * waves));
  b->eos = false;
  b->rows = rows;
  b->prompts = rows * waves * ranks;
  b->response = response < room ? response : room;
}

static int measure_all(RolloutBench *b, Model *m, Error *err) {
  double copy_rate = device_measure(b->rig.device).copy_bytes;
  RolloutFigures f = {0}, fixed = {0};
  if (measure_lengths(b, m, copy_rate, &f, err)) return -1;
  if (!b->compare) return 0;
  fix_lengths(b, &f);
  if (b->rig.grid->rank == 0) printf("\n");
  if (measure_lengths(b, m, copy_rate, &fixed, err)) return -1;
  if (b->rig.grid->rank == 0)
    printf("\nlengths at random have %.1f %% of the tokens/s of fixed ones\n",
           100 * (f.generated / f.all) / (fixed.generated / fixed.all));
  return 0;
}

static int measure(RolloutBench *b, Error *err) {
  ModelOptions o = {.head = HEAD_LM, .seed = 1, .zero = engine_of(b)};
  Arena *arena = arena_create(b->rig.device, bench_take, bench_give);
  Model *m = bench_model_create(b->rig.device, b->rig.grid, arena, &b->config, &o);
  int rc = measure_all(b, m, err);
  model_free(m);
  arena_free(arena);
  return rc;
}

static CliResult read_mode(RolloutBench *b, const Args *a, Error *err) {
  if (!args_given(a, "--modes")) return CLI_OK;
  int n = bench_modes_parse(args_text(a, "--modes"), &b->mode, err);
  if (n == 1) return CLI_OK;
  if (n > 1) error_set(err, "--modes: found %d of them; rollout expects one", n);
  return CLI_USAGE;
}

static CliResult read_args(RolloutBench *b, const Args *a, Error *err) {
  const char *lengths = args_word(a, "--lengths");
  b->prompts = (int)args_int(a, "--prompts");
  b->length = (int)args_int(a, "--prompt-length");
  b->response = (int)args_int(a, "--response");
  b->rows = (int)args_int(a, "--rows");
  b->look = (int)args_int(a, "--look");
  b->runs = args_given(a, "--steps") ? (int)args_int(a, "--steps") : 1;
  if (args_weights(a, &b->kind, err) || read_mode(b, a, err)) return CLI_USAGE;
  b->compare = strcmp(lengths, "compare") == 0;
  b->eos = b->compare || strcmp(lengths, "eos") == 0;
  if (!b->eos && strcmp(lengths, "fixed") != 0) {
    error_set(err, "--lengths: found \"%s\"; expected fixed, eos or compare", lengths);
    return CLI_USAGE;
  }
  if ((int64_t)b->prompts * b->length <= INT32_MAX) return CLI_OK;
  error_set(err, "--prompts x --prompt-length: expected at most %d tokens", INT32_MAX);
  return CLI_USAGE;
}

static int open_model(RolloutBench *b, const Args *a, Error *err) {
  int response = b->eos ? SHORTEST : b->response;
  if (bench_model(args_text(a, "--model"), &b->name, &b->config, err)) return -1;
  if (b->length + response <= b->config.max_positions) return 0;
  return error_set(err, "prompt and answer are %d tokens together; %s takes %d positions",
                   b->length + response, b->name, b->config.max_positions);
}

CliResult bench_rollout(const Args *a, Error *err) {
  RolloutBench b = {0};
  CliResult rc = read_args(&b, a, err);
  if (rc == CLI_OK) rc = bench_rig_open(&b.rig, a, err);
  if (rc == CLI_OK && comm_agree(b.rig.grid->all, open_model(&b, a, err), err)) rc = CLI_FAILED;
  if (rc == CLI_OK && measure(&b, err)) rc = CLI_FAILED;
  bench_rig_close(&b.rig);
  free(b.mode);
  return rc;
}
