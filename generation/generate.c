/* generate: checks, sizes, the loop of admission, prefill and decode. Collective at its ends:
 * the ranks agree that all requests are sound, gather the weights, each runs its own requests to
 * the end (together.c: all of them together), and they agree again. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "generation/decode.h"
#include "generation/pool.h"

enum { DEFAULT_PAGE = 16, DEFAULT_BATCH = 64, MOST_BY_PAGES = 256 };
enum { PREFILL_CPU = 4096, PREFILL_GPU = 16384 };
enum { ENTER_TOGETHER = 16 }; /* a sixteenth of the rows */

typedef struct Sizes {
  int page_size, n_pages, max_rows, table_width, prefill_tokens, longest;
  int entering; /* rows that must be free before others enter */
} Sizes;

int gen_prefill_tokens(DeviceKind kind) { return kind == DEVICE_CPU ? PREFILL_CPU : PREFILL_GPU; }

static int min_int(int a, int b) { return a < b ? a : b; }

static int check_params(const GenParams *p, const ModelConfig *c, Error *err) {
  const SampleParams *s = &p->sample;
  if (p->max_new_tokens < 1)
    return error_set(err, "max_new_tokens is %d; expected at least 1", p->max_new_tokens);
  if (p->min_new_tokens < 0 || p->min_new_tokens > p->max_new_tokens)
    return error_set(err, "min_new_tokens is %d; expected 0 to max_new_tokens, %d",
                     p->min_new_tokens, p->max_new_tokens);
  if (!s->greedy && !(s->temperature > 0))
    return error_set(err, "temperature is %g; expected above 0 (or greedy)",
                     (double)s->temperature);
  if (s->top_k < 0 || !(s->top_p > 0 && s->top_p <= 1))
    return error_set(err, "top_k is %d and top_p %g; expected at least 0 and in (0, 1]", s->top_k,
                     (double)s->top_p);
  if (!(s->min_p >= 0 && s->min_p <= 1))
    return error_set(err, "min_p is %g; expected 0 to 1", (double)s->min_p);
  if (!(s->repetition_penalty >= 0 && s->repetition_penalty < INFINITY))
    return error_set(err, "repetition_penalty is %g; expected a number above 0 (1: none)",
                     (double)s->repetition_penalty);
  if (p->max_batch < 0 || p->page_size < 0 || p->max_kv_tokens < 0 || p->prefill_tokens < 0 ||
      p->look < 0)
    return error_set(
        err, "max_batch, page_size, max_kv_tokens, prefill_tokens, look: expected 0 or more");
  if (p->keep && s->greedy) return error_set(err, "keep with greedy; expected one of them");
  if (p->n_eos < 0 || p->n_eos > MODEL_MAX_EOS)
    return error_set(err, "%d EOS ids; expected at most %d", p->n_eos, MODEL_MAX_EOS);
  for (int i = 0; i < p->n_eos; i++)
    if (p->eos_ids[i] < 0 || p->eos_ids[i] >= c->vocab_size)
      return error_set(err, "EOS id %d is outside the model's vocabulary of %d", p->eos_ids[i],
                       c->vocab_size);
  return 0;
}

static int check_request(const GenRequest *q, int i, const ModelConfig *c, Error *err) {
  if (q->prompt_len < 1)
    return error_set(err, "prompt %d (request %d) is empty; expected at least one token",
                     q->prompt_id, i);
  if (q->prompt_len >= c->max_positions)
    return error_set(err,
                     "prompt %d (request %d) has %d tokens; the model takes %d positions, so at "
                     "most %d leave room for an answer",
                     q->prompt_id, i, q->prompt_len, c->max_positions, c->max_positions - 1);
  for (int t = 0; t < q->prompt_len; t++)
    if (q->prompt[t] < 0 || q->prompt[t] >= c->vocab_size)
      return error_set(err, "prompt %d (request %d): token %d is %d; the model's vocabulary is %d",
                       q->prompt_id, i, t, q->prompt[t], c->vocab_size);
  return 0;
}

/* Rows, pages and table width for n requests with these limits; for none as for a short one, which
 * a rank may need that steps with others. The newest token of a sequence
 * is never in the cache when it ends, so a limit of L tokens needs L - 1 slots. */
static int plan_sizes(const GenParams *p, DeviceKind kind, const int32_t *limits, int n, Sizes *z,
                      Error *err) {
  int longest = 2;
  for (int i = 0; i < n; i++) longest = limits[i] > longest ? limits[i] : longest;
  z->page_size = p->page_size ? p->page_size : DEFAULT_PAGE;
  z->table_width = (longest - 2) / z->page_size + 1;
  int64_t budget = p->max_kv_tokens / z->page_size, rows = p->max_batch;
  if (p->max_kv_tokens && budget < z->table_width)
    return error_set(err, "max_kv_tokens is %lld; the longest request needs %d pages of %d tokens",
                     (long long)p->max_kv_tokens, z->table_width, z->page_size);
  if (rows == 0) rows = p->max_kv_tokens ? MOST_BY_PAGES : DEFAULT_BATCH;
  z->max_rows = (int)(rows < n ? rows : n > 0 ? n : 1);
  int64_t useful = (int64_t)z->max_rows * z->table_width;
  int64_t pages = p->max_kv_tokens && budget < useful ? budget : useful;
  int64_t slots = pages * z->page_size;
  if (slots > INT32_MAX)
    return error_set(err, "a KV cache of %lld tokens is too large; set max_batch or max_kv_tokens",
                     (long long)slots);
  z->n_pages = (int)pages;
  z->prefill_tokens = p->prefill_tokens ? p->prefill_tokens : gen_prefill_tokens(kind);
  z->longest = longest;
  z->entering = gen_look(p, kind) > 1 ? z->max_rows / ENTER_TOGETHER : 1;
  return 0;
}

/* Largest prefill: one chunk, or the longest sequence alone. */
static int most_prefill(const Sizes *z, const int32_t *limits, int n) {
  int64_t all = 0, longest = 0;
  for (int i = 0; i < n; i++) {
    all += limits[i];
    longest = limits[i] > longest ? limits[i] : longest;
  }
  int64_t chunk = z->prefill_tokens > longest ? z->prefill_tokens : longest;
  return (int)(all < chunk ? all : chunk);
}

/* A prefill of one prompt reads all weights, too, and holds up all rows; so sequences enter a few
 * at a time, or all that are left. */
bool is_time_to_enter(const Scheduler *s, int entering) {
  int free_rows = s->max_rows - s->n_rows;
  return s->n_rows == 0 || free_rows >= entering || free_rows >= s->n_waiting;
}

/* Those that wait enter, and all rows go on by some steps. */
static int go_on(Decoder *d, Scheduler *s, const Sizes *z, GenStats *stats, Error *err) {
  double t0 = clock_seconds();
  bool enter = is_time_to_enter(s, z->entering);
  for (int fresh; enter && (fresh = sched_admit(s, z->prefill_tokens)) > 0;)
    if (decoder_prefill(d, s->n_rows - fresh, err)) return -1;
  double t1 = clock_seconds();
  stats->prefill_seconds += t1 - t0;
  if (s->n_rows == 0) return 0;
  if (decoder_decode(d, (StepPlan){.steps = decoder_plan(d)}, err)) return -1;
  stats->decode_seconds += clock_seconds() - t1;
  return 0;
}

/* -1: an error of this rank; 1: of another one. */
static int run_all(Decoder *d, Scheduler *s, const Sizes *z, Pool *pool, GenStats *stats,
                   Error *err) {
  int rc = 0;
  while (pool->open || (rc == 0 && s->n_waiting + s->n_rows > 0)) {
    if (rc || pool_is_due(pool, s, stats->decode_steps)) {
      double t0 = clock_seconds();
      bool failed = pool_deal(pool, s, stats->decode_steps, rc != 0);
      stats->wait_seconds += clock_seconds() - t0;
      if (failed) return rc ? rc : 1;
    } else {
      rc = go_on(d, s, z, stats, err);
    }
  }
  return rc;
}

/* In tensor parallel all ranks of the node fill up to as many rows as the one with most. */
static int most_rows(Model *m, const GenParams *p, const Sizes *z) {
  double rows = bucket_rows(p, device_kind(model_device(m)), z->max_rows);
  if (p->weights == ROLLOUT_TENSOR_PARALLEL)
    comm_all_reduce_f64(model_rollout_group(m, p->weights), &rows, 1, true);
  return (int)rows;
}

static int run_requests(Model *m, const GenParams *p, const GenRequest *req, int n,
                        const int32_t *limits, const Sizes *z, GenResult *out, GenStats *stats,
                        Error *err) {
  ArenaMark mark = arena_mark(model_arena(m));
  KvCache kv = kv_create(model_arena(m), model_attn_shape(m), model_compute(m),
                         model_config(m)->n_layers, z->n_pages, z->page_size);
  const Grid *g = model_grid(m);
  Scheduler s =
      sched_create(&kv, req, out, limits, n, p->owner, g->local_rank, z->max_rows, z->table_width);
  Decoder *d = decoder_create(m, p, &s, z->longest - 1, most_prefill(z, limits, n),
                              most_rows(m, p, z), stats);
  Comm *group = model_rollout_group(m, p->weights);
  bool fills = buckets_fill(p, device_kind(model_device(m)));
  Stepping together = {m, group, d, &s, z->prefill_tokens, z->entering, fills};
  Pool pool = {g->intra, p->owner, !group && p->owner && g->local > 1, 0};
  if (p->weights == ROLLOUT_TENSOR_PARALLEL) /* the node's tokens are computed by all its ranks */
    together.prefill_tokens = 1 + (z->prefill_tokens - 1) / comm_size(group);
  int rc = group ? step_together(&together, stats, err) : run_all(d, &s, z, &pool, stats, err);
  require(rc || kv.n_free == kv.n_pages);
  decoder_destroy(d);
  sched_destroy(&s);
  kv_destroy(&kv);
  arena_pop(model_arena(m), mark);
  return rc;
}

/* Checks everything and fills limits (at most max_positions tokens per sequence) and sizes. */
static int prepare(Model *m, const GenParams *p, const GenRequest *req, int n, int32_t *limits,
                   Sizes *z, Error *err) {
  const ModelConfig *c = model_config(m);
  require(model_head(m) == HEAD_LM);
  if (check_params(p, c, err) || model_rollout_check(m, p->weights, p->format, err)) return -1;
  for (int i = 0; i < n; i++) {
    if (check_request(&req[i], i, c, err)) return -1;
    int room = c->max_positions - req[i].prompt_len;
    int most = p->max_new_of ? p->max_new_of[i] : p->max_new_tokens;
    require(most >= 1);
    limits[i] = req[i].prompt_len + min_int(min_int(most, p->max_new_tokens), room);
  }
  return plan_sizes(p, device_kind(model_device(m)), limits, n, z, err);
}

/* Where rotary positions depend on the length of a sequence and the caller has not fixed it: for
 * this call, the longest that any rank's requests may reach. Returns what it was. */
static int fix_rope(Model *m, const int32_t *limits, int n) {
  int before = model_rope_fixed(m);
  if (before || !model_rope_varies(model_config(m))) return before;
  double longest = 1;
  for (int i = 0; i < n; i++)
    if (limits[i] > longest) longest = limits[i];
  comm_all_reduce_f64(model_grid(m)->all, &longest, 1, true);
  model_rope_fix(m, (int)longest);
  return before;
}

static uint64_t inter_bytes(void) {
  uint64_t bytes = 0;
  Traffic t = traffic_now();
  for (int k = 0; k < COLL_KINDS; k++) bytes += t.of[k].inter_bytes;
  return bytes;
}

int generate(Model *m, const GenParams *p, const GenRequest *req, int n, GenResult *out,
             GenStats *stats, Error *err) {
  GenStats local = {0};
  Sizes z = {0};
  Comm *all = model_grid(m)->all;
  int32_t *limits = mem_alloc((size_t)n, sizeof *limits);
  for (int i = 0; i < n; i++) out[i] = (GenResult){0};
  size_t kept_width = (size_t)(model_config(m)->vocab_size + 7) / 8;
  int rc = comm_agree(all, prepare(m, p, req, n, limits, &z, err), err);
  if (rc == 0) {
    for (int i = 0; i < n; i++) {
      size_t room = (size_t)(limits[i] - req[i].prompt_len);
      out[i].tokens = mem_alloc(room, sizeof *out[i].tokens);
      out[i].logprobs = mem_alloc(room, sizeof *out[i].logprobs);
      if (p->keep) out[i].kept = mem_alloc(room, kept_width);
    }
    double t0 = clock_seconds();
    int rope_before = fix_rope(m, limits, n);
    uint64_t before = inter_bytes();
    model_rollout_begin(m, p->weights, p->format);
    local.gather_seconds = clock_seconds() - t0;
    if (n > 0 || model_rollout_group(m, p->weights))
      rc = run_requests(m, p, req, n, limits, &z, out, &local, err);
    model_rollout_end(m);
    local.inter_bytes = inter_bytes() - before;
    model_rope_fix(m, rope_before);
    rc = comm_agree(all, rc, err);
  }
  for (int i = 0; i < n; i++) {
    if (p->owner && p->owner[i] != model_grid(m)->local_rank) {
      gen_results_free(&out[i], 1);
      continue;
    }
    local.prompt_tokens += req[i].prompt_len;
    local.generated_tokens += out[i].n;
  }
  if (rc) gen_results_free(out, n);
  free(limits);
  if (stats) *stats = local;
  return rc;
}

void gen_results_free(GenResult *r, int n) {
  for (int i = 0; i < n; i++) {
    free(r[i].tokens);
    free(r[i].logprobs);
    free(r[i].kept);
    memset(&r[i], 0, sizeof r[i]);
  }
}
