/* Plans of cuDNN by shape. A plan takes cuDNN a third of a second to compile, so shapes that differ
 * a little share one (attention_cudnn.cu rounds them up), and none is built twice. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_report.h"

enum { CUDNN_OLDEST = 91400 }; /* the first that the graphs were tested with */

static void open_cudnn(CudaAttention *a) {
  Error err = {""};
  if (cudnn_open(&a->dnn, &err)) {
    snprintf(a->why, sizeof a->why, "%.1000s", err.msg);
    return;
  }
  size_t version = a->dnn.cudnnGetVersion();
  cudnnStatus_t status =
      version < CUDNN_OLDEST ? CUDNN_STATUS_NOT_SUPPORTED : a->dnn.cudnnCreate(&a->handle);
  if (version < CUDNN_OLDEST)
    snprintf(a->why, sizeof a->why, "cuDNN %zu is older than %d", version, CUDNN_OLDEST);
  else if (status != CUDNN_STATUS_SUCCESS)
    snprintf(a->why, sizeof a->why, "cudnnCreate: %s", a->dnn.cudnnGetErrorString(status));
  if (a->why[0]) a->handle = nullptr;
}

CudaAttention *attention_of(Device *d) {
  CudaDevice *c = cuda_of(d);
  if (!c->attention) {
    c->attention = static_cast<CudaAttention *>(mem_zalloc(1, sizeof(CudaAttention)));
    c->attention->most_workspace = static_cast<int64_t>(d->total_memory / 16);
    open_cudnn(c->attention);
    if (!c->attention->handle)
      log_warn("attention runs on rlhf's own kernels, which are slower than cuDNN's: %s",
               c->attention->why);
  }
  return c->attention;
}

void attention_close(CudaAttention *a) {
  if (!a) return;
  for (AttnPlan *&list : a->plans)
    while (list) {
      AttnPlan *next = list->next;
      graph_free(list->graph);
      free(list);
      list = next;
    }
  if (a->handle) a->dnn.cudnnDestroy(a->handle);
  free(a);
}

/* FNV-1a of the numbers, one by one: a struct has gaps. */
static uint32_t key_hash(const AttnGraphKey &k) {
  int parts[] = {k.n_heads, k.n_kv_heads, k.head_dim, k.window,
                 k.n_seqs,  k.len,        k.packed,   k.backward};
  uint32_t h = 2166136261u;
  for (int part : parts)
    for (int byte = 0; byte < 4; byte++)
      h = (h ^ (static_cast<uint32_t>(part) >> (8 * byte) & 255)) * 16777619u;
  return h;
}

static bool key_equal(const AttnGraphKey &a, const AttnGraphKey &b) {
  return a.n_heads == b.n_heads && a.n_kv_heads == b.n_kv_heads && a.head_dim == b.head_dim &&
         a.window == b.window && a.n_seqs == b.n_seqs && a.len == b.len && a.packed == b.packed &&
         a.backward == b.backward;
}

static char *describe_key(const AttnGraphKey &k) {
  return mem_printf("attention %s, %d heads on %d of %d, %s%d x %d%s",
                    k.backward ? "backward" : "forward", k.n_heads, k.n_kv_heads, k.head_dim,
                    k.packed ? "packed up to " : "", k.n_seqs, k.len,
                    k.window ? ", sliding window" : "");
}

/* A plan, or the reason why there is none in graph->error. */
static CudnnGraph *build(CudaAttention *a, AttnGraphKey key) {
  CudnnGraph *g = attention_graph(&a->dnn, a->handle, key);
  if (g->plan && g->workspace > a->most_workspace) {
    snprintf(g->error, sizeof g->error, "a workspace of %.1f GB, of at most %.1f GB",
             1e-9 * static_cast<double>(g->workspace),
             1e-9 * static_cast<double>(a->most_workspace));
    g->plan = nullptr;
  }
  return g;
}

AttnPlan *attention_plan(CudaAttention *a, AttnGraphKey key) {
  AttnPlan **list = &a->plans[key_hash(key) % ATTN_PLAN_LISTS], *plan = *list;
  while (plan && !key_equal(plan->key, key)) plan = plan->next;
  if (!plan) {
    double start = clock_seconds();
    plan = static_cast<AttnPlan *>(mem_zalloc(1, sizeof *plan));
    plan->key = key;
    plan->graph = build(a, key);
    plan->build_seconds = clock_seconds() - start;
    plan->next = *list;
    *list = plan;
    if (!plan->graph->plan) {
      char *what = describe_key(key);
      log_warn("%s: rlhf's own kernels serve it, for cuDNN does not: %s", what, plan->graph->error);
      free(what);
    }
  }
  return plan->graph->plan ? plan : nullptr;
}

char *cuda_attention_report(Device *d) {
  CudaAttention *a = attention_of(d);
  if (!a->handle) return mem_strdup(a->why);
  char *text = mem_printf("cuDNN %zu%s\n", a->dnn.cudnnGetVersion(),
                          cuda_of(d)->arch == 90
                              ? "; heads of 64 and 128 without a window: the own kernels for Hopper"
                              : "");
  for (AttnPlan *list : a->plans)
    for (AttnPlan *p = list; p; p = p->next) {
      const CudnnGraph *g = p->graph;
      char *what = describe_key(p->key), *before = text;
      if (g->plan)
        text = mem_printf("%s%s: %s, %.1f MB of workspace, built in %.3f s\n", before, what,
                          g->engine, 1e-6 * static_cast<double>(g->workspace), p->build_seconds);
      else
        text = mem_printf("%s%s: refused: %s\n", before, what, g->error);
      free(what);
      free(before);
    }
  return text;
}
