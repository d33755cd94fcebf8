/* See memory_plan.h. */
#include "orchestrator/memory_plan.h"

#include <stdlib.h>

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

uint64_t memory_limit(const Device *d) {
  uint64_t all = device_total_memory(d);
  return device_kind(d) == DEVICE_CPU ? all : all - all / 32;
}

/* ---- what stays ---- */

static void add_model(const PlannedStage *s, const PlannedModel *m, MemoryNeed *need) {
  ParamSpec *specs;
  int n = model_specs(m->config, m->head, &specs);
  ZeroPPConfig zero = s->zero;
  zero.trainable = m->trainable;
  ZeroPPMemory z = zeropp_memory(&zero, specs, n, s->nodes, s->local, m->ema);
  need->weights += z.master + z.secondary;
  need->moments += z.moments;
  need->gradients += z.gradients + z.errors;
  need->ema += z.ema;
  need->gathered += z.full_units;
  free(specs);
}

/* ---- what a phase takes ---- */

static PassPlan pass_plan(const PlannedStage *s, bool train) {
  return (PassPlan){s->device,        s->zero.compute,     train,
                    s->recompute.how, s->recompute.blocks, s->kept};
}

static uint64_t activation_bytes(const PlannedStage *s) {
  uint64_t most = 0;
  int64_t asked = max_i64(s->micro_tokens, s->longest);
  for (int i = 0; i < s->n_models; i++) {
    const PlannedModel *m = &s->model[i];
    int64_t tokens = min_i64(asked, max_i64(s->batch_tokens, s->longest));
    most = max_u64(most,
                   model_activation_bytes(m->config, m->head, tokens, pass_plan(s, m->trainable)));
  }
  return most;
}

int64_t memory_kv_tokens(const PlannedStage *s) {
  int64_t pages = (s->longest + s->page_size - 1) / s->page_size;
  return s->rollout_rows * pages * s->page_size;
}

/* KV pages, one prefill, the logits of a decode step, and rows of bits: what the repetition penalty
 * looks at, and what a burst's draws were from. In tensor parallel a rank computes its rows of W
 * for the tokens of its whole node: the prefills together are as large as one, if no prompt alone
 * is larger, and logits come and go in pieces. */
static uint64_t rollout_bytes(const PlannedStage *s) {
  if (s->rollout_rows == 0) return 0;
  const ModelConfig *c = s->model[0].config;
  bool sliced = s->weights == ROLLOUT_TENSOR_PARALLEL;
  uint64_t per_token = 2 * (uint64_t)dtype_size(s->zero.compute) * (uint64_t)c->n_layers *
                       (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim;
  int64_t chunk = gen_prefill_tokens(s->device), ranks = sliced ? s->local : 1;
  int64_t prefill =
      max_i64(min_i64(chunk, ranks * s->rollout_rows * s->longest), ranks * s->longest);
  uint64_t logits = (uint64_t)s->rollout_rows * (uint64_t)c->vocab_size * sizeof(float);
  uint64_t bits = (uint64_t)s->rollout_rows * (((uint64_t)c->vocab_size + 7) / 8);
  GenParams as_usual = {.look = 0};
  uint64_t rows = s->penalty + (s->kept ? (uint64_t)gen_look(&as_usual, s->device) : 0);
  PassPlan pass = pass_plan(s, false);
  pass.restricted = false; /* sampling filters */
  return (uint64_t)memory_kv_tokens(s) * per_token + logits * (sliced ? 3 : 1) + bits * rows +
         model_activation_bytes(c, HEAD_LM, prefill, pass);
}

static uint64_t replica_bytes(const PlannedStage *s) {
  if (s->rollout_rows == 0) return 0;
  ZeroPPConfig zero = s->zero;
  zero.trainable = s->model[0].trainable;
  return model_rollout_bytes(s->model[0].config, &zero, s->nodes, s->local, s->weights, s->format);
}

MemoryNeed memory_need(const PlannedStage *s) {
  MemoryNeed need = {0};
  for (int i = 0; i < s->n_models; i++) add_model(s, &s->model[i], &need);
  need.activations = activation_bytes(s);
  need.rollout = rollout_bytes(s);
  need.replica = replica_bytes(s);
  need.arena = max_u64(need.activations, need.rollout);
  need.total = need.weights + need.moments + need.gradients + need.ema + need.gathered +
               max_u64(need.activations, need.rollout + need.replica);
  return need;
}

/* ---- what would fit ---- */

/* Largest x in [1, most] for which the stage with x in *field fits; 0: none. Need grows with x. */
static int64_t largest_fit(PlannedStage *s, int64_t *field, uint64_t limit) {
  int64_t most = *field, low = 0, high = most;
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    *field = middle;
    if (memory_need(s).total <= limit)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

int64_t memory_fit_micro(const PlannedStage *s, uint64_t limit) {
  PlannedStage t = *s;
  return largest_fit(&t, &t.micro_tokens, limit);
}

int64_t memory_fit_rows(const PlannedStage *s, uint64_t limit) {
  PlannedStage t = *s;
  return largest_fit(&t, &t.rollout_rows, limit);
}

RolloutWeights memory_choose_weights(const PlannedStage *s, uint64_t limit) {
  PlannedStage t = *s;
  RolloutWeights best = ROLLOUT_REPLICA;
  int64_t most = -1;
  for (RolloutWeights w = ROLLOUT_REPLICA; w <= ROLLOUT_STREAM && most < s->rollout_rows; w++) {
    bool same = w == ROLLOUT_TENSOR_PARALLEL ? s->local == 1 : s->nodes * s->local == 1;
    if (w != ROLLOUT_REPLICA && (same || s->zero.stage < 3)) continue;
    if (w == ROLLOUT_STREAM && s->format != zeropp_rollout_format(&s->zero)) continue;
    t.weights = w;
    int64_t rows = memory_fit_rows(&t, limit);
    if (rows <= most) continue;
    most = rows;
    best = w;
  }
  return best;
}

void memory_choose_recompute(PlannedStage *s, uint64_t limit) {
  RecomputeChoice *r = &s->recompute;
  int most = 0;
  if (!r->by_memory) return;
  for (int i = 0; i < s->n_models; i++)
    if (s->model[i].config->n_layers > most) most = s->model[i].config->n_layers;
  r->how = RECOMPUTE_NONE;
  r->blocks = 0;
  if (memory_need(s).total <= limit) return;
  r->how = RECOMPUTE_SELECTIVE;
  while (memory_need(s).total > limit && r->blocks < most - 1) r->blocks++;
  if (r->blocks < most - 1) return;
  *r = (RecomputeChoice){.how = RECOMPUTE_FULL, .by_memory = true};
  if (memory_need(s).total > limit)
    *r = (RecomputeChoice){.how = RECOMPUTE_SELECTIVE, .blocks = most, .by_memory = true};
}

void memory_print(const PlannedStage *stages, int n, uint64_t limit, FILE *out) {
  const double mib = 1024.0 * 1024.0;
  fprintf(out, "memory plan, MiB per rank (%.0f there)\n", (double)limit / mib);
  fprintf(out, "%-8s %9s %9s %9s %9s %9s %11s %9s %9s\n", "stage", "weights", "moments",
          "gradients", "average", "gathered", "activations", "rollout", "total");
  for (int i = 0; i < n; i++) {
    MemoryNeed m = memory_need(&stages[i]);
    fprintf(out, "%-8s %9.1f %9.1f %9.1f %9.1f %9.1f %11.1f %9.1f %9.1f\n", stages[i].name,
            (double)m.weights / mib, (double)m.moments / mib, (double)m.gradients / mib,
            (double)m.ema / mib, (double)m.gathered / mib, (double)m.activations / mib,
            (double)(m.rollout + m.replica) / mib, (double)m.total / mib);
  }
}
