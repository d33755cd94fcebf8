/* A reward folder: the head at every token, the score, the pair loss and its gradients. */
#include <stdlib.h>

#include "reward/reward.h"
#include "tests/parity.h"

static void check_values(Parity *p, Model *m, const Sequences *seqs) {
  int n = seqs->offsets[seqs->n];
  int32_t *rows = mem_alloc((size_t)n, sizeof *rows);
  float *values_N = mem_alloc((size_t)n, sizeof *values_N);
  for (int i = 0; i < n; i++) rows[i] = i;
  model_values(m, sequences_batch(seqs), n, rows, values_N);
  for (int s = 0; s < seqs->n; s++) {
    char name[32];
    int first = seqs->offsets[s], len = seqs->offsets[s + 1] - first;
    snprintf(name, sizeof name, "seq%d.values", s);
    parity_check(p, "values", PARITY_VALUE, values_N + first, name, len);
    snprintf(name, sizeof name, "seq%d.score", s);
    parity_pool(p, "score", values_N + first + len - 1, name, 1);
  }
  free(rows);
  free(values_N);
}

int parity_reward(Parity *p, Error *err) {
  Model *m = parity_load(p, p->dir, HEAD_SCALAR, err);
  if (!m) return -1;
  Sequences seqs = parity_sequences(p);
  check_values(p, m, &seqs);
  /* A step at learning rate 0 leaves the weights and, in the shards, the gradient. */
  PairBatch pairs = {.n_pairs = seqs.n / 2, .offsets = seqs.offsets, .tokens = seqs.tokens};
  AdamW still = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  PairStats stats;
  reward_train_step(m, &pairs, 64, still, 0, &stats);
  float loss = (float)stats.loss;
  parity_check(p, "pair loss", PARITY_VALUE, &loss, "pair_loss", 1);
  parity_params(p, "gradients", m, STATE_GRAD, "grad.");
  sequences_free(&seqs);
  model_free(m);
  return 0;
}
