/* Rollout: allocation, the fields that were written, and the weights of a mean over responses. */
#include "core/rollout.h"

#include <stdlib.h>
#include <string.h>

Rollout *rollout_create(int n_seqs, const int32_t *lengths) {
  require(n_seqs >= 0);
  Rollout *r = mem_zalloc(1, sizeof *r);
  size_t b = (size_t)n_seqs;
  r->n_seqs = n_seqs;
  r->offsets = mem_zalloc(b + 1, sizeof *r->offsets);
  for (int i = 0; i < n_seqs; i++) {
    require(lengths[i] > 0 && lengths[i] <= INT32_MAX - r->offsets[i]);
    r->offsets[i + 1] = r->offsets[i] + lengths[i];
  }
  r->n_tokens = r->offsets[n_seqs];
  size_t n = (size_t)r->n_tokens;
  r->tokens = mem_zalloc(n, sizeof *r->tokens);
  r->prompt_len = mem_zalloc(b, sizeof *r->prompt_len);
  r->prompt_id = mem_zalloc(b, sizeof *r->prompt_id);
  r->sample_id = mem_zalloc(b, sizeof *r->sample_id);
  r->ended = mem_zalloc(b, sizeof *r->ended);
  r->sampled_logprobs = mem_zalloc(n, sizeof(float));
  r->old_logprobs = mem_zalloc(n, sizeof(float));
  r->ref_logprobs = mem_zalloc(n, sizeof(float));
  r->values = mem_zalloc(n, sizeof(float));
  r->rewards = mem_zalloc(n, sizeof(float));
  r->advantages = mem_zalloc(n, sizeof(float));
  r->returns = mem_zalloc(n, sizeof(float));
  r->scores = mem_zalloc(b, sizeof(float));
  return r;
}

void rollout_keep(Rollout *r, int width) {
  require(!r->kept && width > 0);
  r->kept = mem_zalloc((size_t)r->n_tokens, (size_t)width);
  r->kept_width = width;
}

void rollout_free(Rollout *r) {
  if (!r) return;
  void *const owned[] = {
      r->offsets, r->tokens,           r->prompt_len,   r->prompt_id,    r->sample_id,
      r->ended,   r->sampled_logprobs, r->old_logprobs, r->ref_logprobs, r->values,
      r->rewards, r->advantages,       r->returns,      r->scores,       r->kept};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
  free(r);
}

static const char *const field_names[] = {"sampled_logprobs", "old_logprobs", "ref_logprobs",
                                          "values",           "scores",       "rewards",
                                          "advantages",       "returns"};

void rollout_need(const Rollout *r, unsigned fields, const char *reader) {
  unsigned missing = fields & ~r->have;
  if (!missing) return;
  char list[256] = "";
  for (size_t i = 0; i < sizeof field_names / sizeof *field_names; i++) {
    if (!(missing & 1u << i)) continue;
    if (list[0]) strcat(list, ", ");
    strcat(list, field_names[i]);
  }
  die("%s reads rollout fields that nobody wrote yet: %s", reader, list);
}

float *rollout_array(Rollout *r, RolloutField field) {
  switch (field) {
    case RO_SAMPLED_LOGPROBS:
      return r->sampled_logprobs;
    case RO_OLD_LOGPROBS:
      return r->old_logprobs;
    case RO_REF_LOGPROBS:
      return r->ref_logprobs;
    case RO_VALUES:
      return r->values;
    case RO_REWARDS:
      return r->rewards;
    case RO_ADVANTAGES:
      return r->advantages;
    case RO_RETURNS:
      return r->returns;
    case RO_SCORES:
      break;
  }
  die("rollout field %#x is not per token", (unsigned)field);
}

int64_t rollout_response_tokens(const Rollout *r) {
  int64_t n = 0;
  for (int b = 0; b < r->n_seqs; b++) n += rollout_response_len(r, b);
  return n;
}

void rollout_weights(const Rollout *r, const int32_t *ids, int n, bool sequence_mean,
                     double *weight) {
  int64_t tokens = 0, answered = 0;
  for (int i = 0; i < n; i++) {
    int len = rollout_response_len(r, ids ? ids[i] : i);
    tokens += len;
    answered += len > 0;
  }
  for (int i = 0; i < n; i++) {
    int b = ids ? ids[i] : i, len = rollout_response_len(r, b);
    double share = sequence_mean ? (double)answered * len : (double)tokens;
    weight[b] = len > 0 ? 1.0 / share : 0.0;
  }
}
