/* A causal folder: logits, log-probabilities, entropy, loss, gradients, greedy decoding, and the
 * newer spelling of its config. */
#include <stdlib.h>
#include <string.h>

#include "generation/generation.h"
#include "tests/parity.h"

static int32_t *all_rows(int n) {
  int32_t *rows = mem_alloc((size_t)n, sizeof *rows);
  for (int i = 0; i < n; i++) rows[i] = i;
  return rows;
}

/* One packed batch and its reference tensors; names count from `first`. */
static void check_logits(Parity *p, Model *m, const char *figure, Batch b, int first) {
  int n = b.offsets[b.n_seqs], vocab = model_config(m)->vocab_size;
  int32_t *rows = all_rows(n);
  float *logits_NV = mem_alloc((size_t)n * (size_t)vocab, sizeof *logits_NV);
  model_logits(m, b, n, rows, logits_NV);
  for (int s = 0; s < b.n_seqs; s++) {
    char name[32];
    snprintf(name, sizeof name, "seq%d.logits", first + s);
    int64_t at = b.offsets[s], len = b.offsets[s + 1] - at;
    parity_check(p, figure, PARITY_VALUE, logits_NV + at * vocab, name, len * vocab);
  }
  free(logits_NV);
  free(rows);
}

/* Rows that predict a next token, and those tokens. */
static int next_token_rows(Batch b, int32_t *rows, int32_t *targets) {
  int n = 0;
  for (int s = 0; s < b.n_seqs; s++)
    for (int t = b.offsets[s]; t + 1 < b.offsets[s + 1]; t++, n++) {
      rows[n] = t;
      targets[n] = b.tokens[t + 1];
    }
  return n;
}

static void check_logprobs(Parity *p, Model *m, Batch b) {
  int n = b.offsets[b.n_seqs];
  int32_t *rows = all_rows(n), *targets = all_rows(n);
  float *logprobs = mem_alloc((size_t)n, sizeof *logprobs);
  float *entropy = mem_alloc((size_t)n, sizeof *entropy);
  int n_rows = next_token_rows(b, rows, targets);
  model_logprobs(m, b, n_rows, rows, targets, 1.0f, logprobs, entropy);
  for (int s = 0, at = 0; s < b.n_seqs; s++) {
    char name[32];
    snprintf(name, sizeof name, "seq%d.logprobs", s);
    int len = b.offsets[s + 1] - b.offsets[s] - 1;
    parity_check(p, "log-probs", PARITY_VALUE, logprobs + at, name, len);
    if (s == 0) parity_check(p, "entropy", PARITY_VALUE, entropy, "hidden.entropy", len);
    at += len;
  }
  free(rows);
  free(targets);
  free(logprobs);
  free(entropy);
}

typedef struct MeanLoss {
  double weight, sum;
} MeanLoss;

static void mean_loss(void *ctx, int first, int n, const float *logprob, const float *entropy,
                      float *dlogprob, float *dentropy) {
  (void)first, (void)entropy, (void)dentropy;
  MeanLoss *l = ctx;
  for (int i = 0; i < n; i++) {
    l->sum -= l->weight * (double)logprob[i];
    dlogprob[i] = (float)-l->weight;
  }
}

/* Sequence s goes to rank s mod world, alone in its micro-batch, so that under several ranks the
 * reduction is part of what is checked. */
static void check_gradients(Parity *p, Model *m, const Sequences *seqs) {
  int n = seqs->offsets[seqs->n];
  int32_t *rows = all_rows(n), *targets = all_rows(n);
  MeanLoss loss = {.weight = 1.0 / (double)(n - seqs->n)};
  zeropp_zero_grad(model_zero(m));
  for (int first = 0; first < seqs->n; first += p->grid->world) {
    int s = first + p->grid->rank;
    int32_t offsets[2] = {0, 0};
    Batch b = {.n_seqs = 0, .offsets = offsets, .tokens = seqs->tokens};
    if (s < seqs->n) {
      offsets[1] = seqs->offsets[s + 1] - seqs->offsets[s];
      b.n_seqs = 1;
      b.tokens = seqs->tokens + seqs->offsets[s];
    }
    int n_rows = next_token_rows(b, rows, targets);
    model_train_lm(m, b, n_rows, rows, targets, 1.0f, false, mean_loss, &loss);
  }
  comm_all_reduce_f64(p->grid->all, &loss.sum, 1, false);
  float sum = (float)loss.sum;
  parity_check(p, "loss", PARITY_VALUE, &sum, "loss", 1);
  parity_params(p, "gradients", m, STATE_GRAD, "grad.");
  free(rows);
  free(targets);
}

/* Where rotary positions depend on the length: whether decoding from PROMPT to n tokens, for which
 * the cache has one length (model_rope_fix), is rotated as each of its prefixes by itself. */
static bool crosses(const ModelConfig *c, int64_t prompt, int64_t n) {
  return model_rope_varies(c) && prompt <= c->rope_original_positions &&
         n > c->rope_original_positions;
}

/* The most likely token behind the first len tokens. */
static int32_t best_next(Model *m, const int32_t *tokens, int32_t len, float *logits_V) {
  int32_t offsets[2] = {0, len}, row = len - 1;
  int best = 0;
  model_logits(m, (Batch){1, offsets, tokens}, 1, &row, logits_V);
  for (int v = 1; v < model_config(m)->vocab_size; v++)
    if (logits_V[v] > logits_V[best]) best = v;
  return best;
}

/* Whether `tokens` are what greedy decoding gives, each time over the whole sequence again. */
static bool is_greedy(Model *m, const int32_t *tokens, int32_t prompt, int32_t n) {
  float *logits_V = mem_alloc((size_t)model_config(m)->vocab_size, sizeof *logits_V);
  bool same = true;
  for (int32_t len = prompt; len < n && same; len++)
    same = best_next(m, tokens, len, logits_V) == tokens[len];
  free(logits_V);
  return same;
}

/* Greedy decoding twice: with the KV cache, and each time over the whole sequence again. Across a
 * change of rotary frequencies PyTorch's (without a cache) has each prefix by its own length; the
 * cache's has one length, and is held against the forward with that length. */
static int check_greedy(Parity *p, Model *m, Error *err) {
  enum { PROMPT = 5 };
  int64_t n;
  int32_t *want = parity_i32(p, "greedy", &n);
  if (n <= PROMPT) die("%s/reference.safetensors: greedy has %lld tokens", p->dir, (long long)n);
  GenParams params = {.sample = {.greedy = true, .top_p = 1}, .max_new_tokens = (int)n - PROMPT};
  GenRequest request = {.prompt = want, .prompt_len = PROMPT};
  GenResult result = {0};
  int rc = generate(m, &params, &request, 1, &result, NULL, err);
  if (!rc) {
    bool same = result.n == n - PROMPT;
    if (same && crosses(model_config(m), PROMPT, n)) {
      int32_t *got = mem_alloc((size_t)n, sizeof *got);
      memcpy(got, want, PROMPT * sizeof *got);
      memcpy(got + PROMPT, result.tokens, (size_t)result.n * sizeof *got);
      model_rope_fix(m, (int)n);
      same = is_greedy(m, got, PROMPT, (int32_t)n);
      model_rope_fix(m, 0);
      free(got);
    } else if (same) {
      same = !memcmp(result.tokens, want + PROMPT, (size_t)result.n * sizeof(int32_t));
    }
    parity_agree(p, "greedy", same);
    gen_results_free(&result, 1);
  }
  parity_agree(p, "greedy, no cache", is_greedy(m, want, PROMPT, (int32_t)n));
  free(want);
  return rc;
}

/* The same weights under config.v5.json (rope_parameters, dtype). */
static int check_newer_spelling(Parity *p, const Sequences *seqs, Error *err) {
  char *config = fs_join(p->dir, "config.v5.json"), *weights = fs_join(p->dir, "model.safetensors");
  int rc = 0;
  if (fs_exists(config) && fs_exists(weights)) {
    char *dir = parity_folder(p, config, weights);
    Model *m = parity_load(p, dir, HEAD_LM, err);
    rc = m ? 0 : -1;
    if (m) check_logits(p, m, "logits, config.v5", sequences_batch(seqs), 0);
    model_free(m);
    comm_barrier(p->grid->all);
    if (p->grid->rank == 0) fs_remove_tree(dir, NULL);
    free(dir);
  }
  free(config);
  free(weights);
  return rc;
}

int parity_causal(Parity *p, Error *err) {
  Model *m = parity_load(p, p->dir, HEAD_LM, err);
  if (!m) return -1;
  Sequences seqs = parity_sequences(p);
  check_logits(p, m, "logits", sequences_batch(&seqs), 0);
  for (int s = 0; s < seqs.n; s++) { /* each alone, too: company must not matter */
    int32_t offsets[2] = {0, seqs.offsets[s + 1] - seqs.offsets[s]};
    check_logits(p, m, "logits", (Batch){1, offsets, seqs.tokens + seqs.offsets[s]}, s);
  }
  check_logprobs(p, m, sequences_batch(&seqs));
  check_gradients(p, m, &seqs);
  int rc = check_greedy(p, m, err);
  model_free(m);
  if (!rc) rc = check_newer_spelling(p, &seqs, err);
  sequences_free(&seqs);
  return rc;
}
