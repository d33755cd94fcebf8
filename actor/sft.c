/* Supervised fine-tuning: the mean negative log-probability of the loss tokens of a global batch.
 */
#include <stdlib.h>

#include "actor/actor.h"
#include "core/minibatch.h"

static SftStats count_tokens(const SftBatch *b) {
  SftStats s = {.tokens = b->offsets[b->n_seqs] - b->offsets[0]};
  for (int i = 0; i < b->n_seqs; i++)
    for (int t = b->offsets[i] + 1; t < b->offsets[i + 1]; t++)
      s.loss_tokens += !b->loss || b->loss[t];
  return s;
}

static Pack pack_examples(const SftBatch *b, const MicroBatch *mb) {
  int32_t *from = mem_alloc((size_t)b->n_seqs, sizeof *from);
  for (int i = 0; i < b->n_seqs; i++) from[i] = 1;
  Pack p = pack_targets(b->offsets, b->tokens, from, mb);
  pack_select(&p, b->loss);
  free(from);
  return p;
}

typedef struct SftPass {
  double weight; /* 1 / loss tokens of the global batch */
  double sum;    /* of negative log-probs on this rank */
} SftPass;

static void sft_rows(void *ctx, int first, int n, const float *logprob, const float *entropy,
                     float *dlogprob, float *dentropy) {
  (void)first, (void)entropy, (void)dentropy;
  SftPass *s = ctx;
  for (int i = 0; i < n; i++) {
    dlogprob[i] = (float)-s->weight;
    s->sum -= (double)logprob[i];
  }
}

static void sft_score(Model *m, const Pack *p, SftPass *s) {
  float *logprob_R = mem_alloc((size_t)p->n_rows, sizeof *logprob_R);
  model_logprobs(m, p->batch, p->n_rows, p->rows, p->targets, 1.0f, logprob_R, NULL);
  for (int i = 0; i < p->n_rows; i++) s->sum -= (double)logprob_R[i];
  free(logprob_R);
}

/* Runs the batch forward, and backward when train; out's loss and counts, all ranks. */
static void sft_pass(Model *m, const SftBatch *b, int micro_tokens, bool train, SftStats *out) {
  int32_t *lengths = packed_lengths(b->offsets, b->n_seqs);
  *out = count_tokens(b);
  if (out->loss_tokens > 0) {
    Grid *g = model_grid(m);
    SftPass pass = {.weight = 1.0 / (double)out->loss_tokens};
    BatchPlan plan = plan_batches(lengths, NULL, b->n_seqs, g->rank, g->world, micro_tokens);
    for (int i = 0; i < plan.n_micro; i++) {
      if (train && i == plan.n_micro - 1) zeropp_last_micro(model_zero(m));
      Pack p = pack_examples(b, &plan.micro[i]);
      if (train)
        model_train_lm(m, p.batch, p.n_rows, p.rows, p.targets, 1.0f, false, sft_rows, &pass);
      else
        sft_score(m, &p, &pass);
      pack_free(&p);
    }
    plan_free(&plan);
    comm_all_reduce_f64(g->all, &pass.sum, 1, false);
    out->loss = pass.sum * pass.weight;
  }
  free(lengths);
}

void sft_step(Model *m, const SftBatch *b, int micro_tokens, AdamW opt, float max_norm,
              SftStats *out) {
  zeropp_zero_grad(model_zero(m));
  sft_pass(m, b, micro_tokens, true, out);
  if (out->loss_tokens == 0) return;
  StepResult step = zeropp_step(model_zero(m), opt, max_norm);
  out->grad_norm = step.grad_norm;
  out->skipped = step.skipped;
}

void sft_eval(Model *m, const SftBatch *b, int micro_tokens, SftStats *out) {
  sft_pass(m, b, micro_tokens, false, out);
}
