/* Every rank holds the whole rollout, bit for bit the same: ranks generate and score their shares,
 * and the calls here exchange them. Only response tokens travel; prompts are known everywhere.
 * Nothing depends on the number of ranks but who sends what. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/orchestrator.h"

/* All ranks' blocks one after another; the caller frees. */
static void *gather_blocks(Comm *c, const void *mine, const size_t *bytes) {
  size_t total = 0;
  for (int r = 0; r < comm_size(c); r++) total += bytes[r];
  void *all = mem_alloc(total, 1);
  comm_all_gather(c, mine, all, bytes);
  return all;
}

/* ---- after generation ---- */

typedef struct SeqHead {
  int32_t n_tokens, ended;
} SeqHead;

/* Lengths and endings of all requests, in request order. */
static SeqHead *share_heads(Comm *c, const int32_t *owner, const GenResult *result, int n) {
  int world = comm_size(c), me = comm_rank(c), own = 0;
  SeqHead *head = mem_alloc((size_t)n, sizeof *head);
  size_t *bytes = mem_zalloc((size_t)world, sizeof *bytes);
  for (int g = 0; g < n; g++) {
    bytes[owner[g]] += sizeof *head;
    if (owner[g] == me) head[own++] = (SeqHead){result[g].n, result[g].ended};
  }
  SeqHead *by_rank = gather_blocks(c, head, bytes);
  SeqHead *all = mem_alloc((size_t)n, sizeof *all);
  for (int r = 0, at = 0; r < world; r++)
    for (int g = 0; g < n; g++)
      if (owner[g] == r) all[g] = by_rank[at++];
  free(head);
  free(bytes);
  free(by_rank);
  return all;
}

/* Exchanges one array of all responses, `size` bytes a token, and puts it in its places of dst
 * (indexed like tokens). pick gives the piece of a result of this rank. */
static void share_responses(Comm *c, const Rollout *ro, const int32_t *owner,
                            const GenResult *result, size_t size,
                            const void *(*pick)(const GenResult *), void *dst) {
  int world = comm_size(c), me = comm_rank(c), n = ro->n_seqs;
  size_t *bytes = mem_zalloc((size_t)world, sizeof *bytes);
  for (int g = 0; g < n; g++) bytes[owner[g]] += (size_t)rollout_response_len(ro, g) * size;
  char *send = mem_alloc(bytes[me], 1), *to = send;
  for (int g = 0; g < n; g++) {
    size_t len = owner[g] == me ? (size_t)rollout_response_len(ro, g) * size : 0;
    if (len > 0) memcpy(to, pick(&result[g]), len);
    to += len;
  }
  char *all = gather_blocks(c, send, bytes), *from = all;
  for (int r = 0; r < world; r++)
    for (int g = 0; g < n; g++) {
      if (owner[g] != r) continue;
      size_t len = (size_t)rollout_response_len(ro, g) * size;
      memcpy((char *)dst + (size_t)rollout_first(ro, g) * size, from, len);
      from += len;
    }
  free(bytes);
  free(send);
  free(all);
}

static const void *pick_tokens(const GenResult *r) { return r->tokens; }
static const void *pick_logprobs(const GenResult *r) { return r->logprobs; }
static const void *pick_kept(const GenResult *r) { return r->kept; }

void rollout_share_kept(Comm *c, Rollout *ro, const int32_t *owner, const GenResult *result,
                        int width) {
  rollout_keep(ro, width);
  share_responses(c, ro, owner, result, (size_t)width, pick_kept, ro->kept);
}

Rollout *rollout_share(Comm *c, const GenRequest *req, int n, const int32_t *owner,
                       const GenResult *result) {
  SeqHead *head = share_heads(c, owner, result, n);
  int32_t *lengths = mem_alloc((size_t)n, sizeof *lengths);
  for (int g = 0; g < n; g++) lengths[g] = req[g].prompt_len + head[g].n_tokens;
  Rollout *ro = rollout_create(n, lengths);
  for (int g = 0; g < n; g++) {
    ro->prompt_len[g] = req[g].prompt_len;
    ro->prompt_id[g] = req[g].prompt_id;
    ro->sample_id[g] = req[g].sample_id;
    ro->ended[g] = (uint8_t)(head[g].ended != 0);
    memcpy(ro->tokens + ro->offsets[g], req[g].prompt,
           (size_t)req[g].prompt_len * sizeof *ro->tokens);
  }
  share_responses(c, ro, owner, result, sizeof *ro->tokens, pick_tokens, ro->tokens);
  share_responses(c, ro, owner, result, sizeof *ro->sampled_logprobs, pick_logprobs,
                  ro->sampled_logprobs);
  ro->have |= RO_SAMPLED_LOGPROBS;
  free(lengths);
  free(head);
  return ro;
}

/* ---- after scoring ---- */

/* The sequences of rank r, in the order of its micro-batches, are order[first[r] .. first[r+1]). */
typedef struct Owners {
  int32_t *order;
  int *first;
} Owners;

static Owners owners_of(const Rollout *ro, int world, int max_tokens) {
  int n = ro->n_seqs, at = 0;
  int32_t *lengths = mem_alloc((size_t)n, sizeof *lengths);
  for (int b = 0; b < n; b++) lengths[b] = rollout_len(ro, b);
  Owners o = {mem_alloc((size_t)n, sizeof *o.order),
              mem_zalloc((size_t)world + 1, sizeof *o.first)};
  for (int r = 0; r < world; r++) {
    BatchPlan plan = plan_batches(lengths, NULL, n, r, world, max_tokens);
    for (int m = 0; m < plan.n_micro; m++)
      for (int i = 0; i < plan.micro[m].n_seqs; i++) o.order[at++] = plan.micro[m].ids[i];
    o.first[r + 1] = at;
    plan_free(&plan);
  }
  require(at == n);
  free(lengths);
  return o;
}

static void owners_free(Owners *o) {
  free(o->order);
  free(o->first);
}

void rollout_share_field(Comm *c, Rollout *ro, RolloutField field, int max_tokens) {
  int world = comm_size(c), me = comm_rank(c);
  float *values = rollout_array(ro, field);
  Owners o = owners_of(ro, world, max_tokens);
  size_t *bytes = mem_zalloc((size_t)world, sizeof *bytes);
  for (int r = 0; r < world; r++)
    for (int i = o.first[r]; i < o.first[r + 1]; i++)
      bytes[r] += (size_t)rollout_response_len(ro, o.order[i]) * sizeof *values;
  float *send = mem_alloc(bytes[me], 1), *to = send;
  for (int i = o.first[me]; i < o.first[me + 1]; i++) {
    int b = o.order[i], len = rollout_response_len(ro, b);
    memcpy(to, values + rollout_first(ro, b), (size_t)len * sizeof *values);
    to += len;
  }
  float *all = gather_blocks(c, send, bytes), *from = all;
  for (int i = 0; i < ro->n_seqs; i++) {
    int b = o.order[i], len = rollout_response_len(ro, b);
    memcpy(values + rollout_first(ro, b), from, (size_t)len * sizeof *values);
    from += len;
  }
  ro->have |= (unsigned)field;
  free(bytes);
  free(send);
  free(all);
  owners_free(&o);
}

void rollout_share_scores(Comm *c, const Rollout *ro, float *scores, int max_tokens) {
  int world = comm_size(c), me = comm_rank(c);
  Owners o = owners_of(ro, world, max_tokens);
  size_t *bytes = mem_zalloc((size_t)world, sizeof *bytes);
  for (int r = 0; r < world; r++) bytes[r] = (size_t)(o.first[r + 1] - o.first[r]) * sizeof *scores;
  float *send = mem_alloc(bytes[me], 1);
  for (int i = o.first[me]; i < o.first[me + 1]; i++) send[i - o.first[me]] = scores[o.order[i]];
  float *all = gather_blocks(c, send, bytes);
  for (int i = 0; i < ro->n_seqs; i++) scores[o.order[i]] = all[i];
  free(bytes);
  free(send);
  free(all);
  owners_free(&o);
}
