/* One mode of the benchmark: k steps of training, timed and counted.
 *
 * The tokens are the same in every step, so that the loss falls (by heart) and a mode that spoils
 * gradients shows. Clocks and traffic run over the steps only: the barrier in front and the sums
 * behind are not part of them. */
#include <stdlib.h>

#include "core/rng.h"
#include "orchestrator/cli_bench.h"

enum { SEED = 1 };

static void *arena_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static void arena_give(void *ctx, void *p) { device_free(ctx, p); }

/* One micro-batch of a rank: every token but a sequence's first is predicted. */
typedef struct Tokens {
  int n_seqs, n_rows;
  int32_t *offsets, *tokens, *rows, *targets;
} Tokens;

static Tokens tokens_draw(const BenchPlan *p, int micro) {
  int n = p->tokens, longest = p->config.max_positions;
  Tokens t = {.n_seqs = (n + longest - 1) / longest};
  t.offsets = mem_alloc((size_t)t.n_seqs + 1, sizeof *t.offsets);
  t.tokens = mem_alloc((size_t)n, sizeof *t.tokens);
  t.rows = mem_alloc((size_t)n, sizeof *t.rows);
  t.targets = mem_alloc((size_t)n, sizeof *t.targets);
  uint64_t stream = (uint64_t)p->grid->rank * (uint64_t)p->micro_batches + (uint64_t)micro;
  for (int i = 0; i < n; i++)
    t.tokens[i] = (int32_t)(rng_uniform(SEED, stream, (uint64_t)i) * p->config.vocab_size);
  for (int s = 0; s <= t.n_seqs; s++) t.offsets[s] = (int32_t)((int64_t)n * s / t.n_seqs);
  for (int s = 0; s < t.n_seqs; s++)
    for (int32_t i = t.offsets[s]; i + 1 < t.offsets[s + 1]; i++) {
      t.rows[t.n_rows] = i;
      t.targets[t.n_rows++] = t.tokens[i + 1];
    }
  return t;
}

static void tokens_free(Tokens *t) {
  free(t->offsets);
  free(t->tokens);
  free(t->rows);
  free(t->targets);
}

typedef struct Loss {
  double weight, sum; /* 1 / rows of all ranks and micro-batches; of this rank's -log p */
} Loss;

static void loss_rows(void *ctx, int first, int n, const float *logprob, const float *entropy,
                      float *dlogprob, float *dentropy) {
  (void)first, (void)entropy, (void)dentropy;
  Loss *l = ctx;
  for (int i = 0; i < n; i++) {
    dlogprob[i] = (float)-l->weight;
    l->sum -= (double)logprob[i];
  }
}

/* This rank's part of the loss. */
static double train_step(Model *m, const BenchPlan *p, const Tokens *micro) {
  double rows = (double)micro[0].n_rows * p->micro_batches * p->grid->world;
  Loss l = {.weight = 1 / rows};
  AdamW opt = {.lr = 1e-3F, .beta1 = 0.9F, .beta2 = 0.95F, .eps = 1e-8F};
  zeropp_zero_grad(model_zero(m));
  for (int k = 0; k < p->micro_batches; k++) {
    const Tokens *t = &micro[k];
    Batch b = {.n_seqs = t->n_seqs, .offsets = t->offsets, .tokens = t->tokens};
    model_train_lm(m, b, t->n_rows, t->rows, t->targets, 1.0F, false, loss_rows, &l);
  }
  zeropp_step(model_zero(m), opt, 1.0F);
  return l.sum * l.weight;
}

typedef struct Count {
  double seconds, intra, inter, hidden, exposed;
} Count;

static Count count_now(void) {
  Traffic t = traffic_now();
  Count c = {.seconds = clock_seconds()};
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    c.intra += (double)t.of[k].intra_bytes;
    c.inter += (double)t.of[k].inter_bytes;
    c.exposed += t.of[k].seconds;
    c.hidden += t.of[k].hidden_seconds;
  }
  return c;
}

static void measure(Model *m, const BenchPlan *p, const Tokens *micro, BenchResult *out) {
  double loss = train_step(m, p, micro); /* buffers, threads and connections come into being */
  comm_barrier(p->grid->all);
  Count a = count_now();
  for (int i = 0; i < p->steps; i++) loss = train_step(m, p, micro);
  Count b = count_now();
  double sum[5] = {b.inter - a.inter, b.intra - a.intra, b.hidden - a.hidden, b.exposed - a.exposed,
                   loss};
  double seconds = b.seconds - a.seconds, world = p->grid->world;
  comm_all_reduce_f64(p->grid->all, sum, 5, false);
  comm_all_reduce_f64(p->grid->all, &seconds, 1, true);
  *out = (BenchResult){.seconds = seconds / p->steps,
                       .inter_bytes = sum[0] / world / p->steps,
                       .intra_bytes = sum[1] / world / p->steps,
                       .hidden = sum[2] / world / p->steps,
                       .exposed = sum[3] / world / p->steps,
                       .loss = sum[4]};
  out->tokens_per_second = (double)p->tokens * p->micro_batches * world / out->seconds;
}

int bench_run(const BenchPlan *p, const BenchMode *mode, BenchResult *out, Error *err) {
  Device *d = device_open(DEVICE_CPU, p->threads, err);
  if (comm_agree(p->grid->all, d ? 0 : -1, err)) return -1;
  Arena *arena = arena_create(d, arena_take, arena_give);
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = SEED, .zero = mode->zero};
  o.zero.prefetch = p->prefetch;
  if (p->micro_batches == 1) o.zero.accumulate_node = false; /* nothing to sum: hide both hops */
  if (p->prefetch) comm_queue_start();
  Model *m = model_create(d, p->grid, arena, &p->config, &o);
  Tokens *micro = mem_alloc((size_t)p->micro_batches, sizeof *micro);
  for (int k = 0; k < p->micro_batches; k++) micro[k] = tokens_draw(p, k);
  measure(m, p, micro, out);
  for (int k = 0; k < p->micro_batches; k++) tokens_free(&micro[k]);
  free(micro);
  model_free(m);
  arena_free(arena);
  device_close(d);
  comm_queue_stop();
  return 0;
}
