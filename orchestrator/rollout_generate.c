/* The requests of one step, dealt to the ranks and generated; ranks of a node help each other. */
#include <stdlib.h>

#include "orchestrator/orchestrator.h"

enum { MOST_ROWS = 256 }; /* where max_batch is left to us */

static int beginner(int request, const Grid *g) { return request % g->world; }

/* Every rank learns who generated what: each knows it of its own node. */
static void share_owners(const Grid *g, int32_t *owner, int n) {
  double *rank = mem_alloc((size_t)n, sizeof *rank);
  for (int i = 0; i < n; i++) rank[i] = owner[i];
  comm_all_reduce_f64(g->all, rank, n, true);
  for (int i = 0; i < n; i++) owner[i] = (int32_t)rank[i];
  free(rank);
}

int rollout_generate(Model *m, const GenParams *given, const GenRequest *all, int n,
                     RolloutShare *out, Error *err) {
  const Grid *g = model_grid(m);
  GenParams p = *given;
  int per_rank = (n + g->world - 1) / g->world, most = p.max_batch ? p.max_batch : MOST_ROWS, k = 0;
  GenRequest *req = mem_alloc((size_t)n, sizeof *req);
  GenResult *result = mem_zalloc((size_t)n, sizeof *result);
  int32_t *local = mem_alloc((size_t)n, sizeof *local);
  require(!p.max_new_of);
  *out = (RolloutShare){
      mem_alloc((size_t)n, sizeof *out->owner), mem_zalloc((size_t)n, sizeof *out->result), n, {0}};
  for (int i = 0; i < n; i++) {
    if (beginner(i, g) / g->local != g->node) continue;
    local[k] = beginner(i, g) % g->local;
    req[k++] = all[i];
  }
  p.owner = local;
  p.max_batch = most < per_rank ? most : per_rank;
  int rc = generate(m, &p, req, k, result, &out->stats, err);
  k = 0;
  for (int i = 0; i < n; i++) {
    out->owner[i] = -1;
    if (beginner(i, g) / g->local != g->node) continue;
    out->owner[i] = g->node * g->local + local[k];
    out->result[i] = result[k++];
  }
  if (rc == 0) share_owners(g, out->owner, n);
  if (rc) rollout_share_free(out);
  free(req);
  free(result);
  free(local);
  return rc;
}

void rollout_share_free(RolloutShare *s) {
  if (s->result) gen_results_free(s->result, s->n);
  free(s->result);
  free(s->owner);
  *s = (RolloutShare){0};
}

double rollout_busy(const RolloutShare *s, Comm *c) {
  double busy = s->stats.prefill_seconds + s->stats.decode_seconds;
  double end[] = {-busy, busy + s->stats.wait_seconds};
  comm_all_reduce_f64(c, end, 2, true);
  return end[1] > 0 ? -end[0] / end[1] : 1;
}
