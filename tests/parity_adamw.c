/* An optimizer folder: steps of fine-tuning from the sibling llama on fixed batches, and where they
 * end. */
#include <stdlib.h>

#include "actor/actor.h"
#include "tests/parity.h"

/* What the fixture's trajectory used (fixtures README). */
static const OptimizerConfig optimizer = {.lr = 1e-3,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-8,
                                          .weight_decay = 0.1,
                                          .max_grad_norm = 1,
                                          .schedule = "constant",
                                          .warmup_steps = 4};

int parity_adamw(Parity *p, Error *err) {
  const StEntry *ids = stset_find(p->reference, "input_ids", NULL);
  if (!ids || ids->ndim != 3) die("%s: input_ids: expected [steps, sequences, length]", p->dir);
  char *dir = fs_join(p->root, "llama");
  Model *m = parity_load(p, dir, HEAD_LM, err);
  free(dir);
  if (!m) return -1;
  int steps = (int)ids->dim[0], n = (int)ids->dim[1], len = (int)ids->dim[2];
  int32_t *tokens = parity_i32(p, "input_ids", NULL);
  int32_t *offsets = mem_alloc((size_t)n + 1, sizeof *offsets);
  float *losses = mem_alloc((size_t)steps, sizeof *losses);
  float *norms = mem_alloc((size_t)steps, sizeof *norms);
  for (int i = 0; i <= n; i++) offsets[i] = i * len;
  for (int s = 0; s < steps; s++) {
    SftBatch batch = {n, offsets, tokens + (size_t)s * (size_t)n * (size_t)len, NULL};
    AdamW adamw = optimizer_adamw(&optimizer, optimizer_lr(&optimizer, s, steps));
    SftStats stats;
    sft_step(m, &batch, 3 * len, adamw, (float)optimizer.max_grad_norm, &stats);
    losses[s] = (float)stats.loss;
    norms[s] = (float)stats.grad_norm;
  }
  parity_check(p, "losses", PARITY_VALUE, losses, "losses", steps);
  parity_check(p, "grad norms", PARITY_VALUE, norms, "grad_norms", steps);
  parity_params(p, "final weights", m, STATE_MASTER, "final.");
  free(tokens);
  free(offsets);
  free(losses);
  free(norms);
  model_free(m);
  return 0;
}
