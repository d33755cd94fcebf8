/* What computes, and in which precision: the words of recipes and options. */
#include <string.h>

#include "orchestrator/orchestrator.h"

/* All ranks compute on the same kind: one without a GPU decides for all. */
static Device *open_on_all(Grid *g, DeviceKind kind, int threads, Error *err) {
  Device *d = device_open(kind, threads, err);
  if (comm_agree(g->all, d ? 0 : -1, err) == 0) return d;
  device_close(d);
  return NULL;
}

Device *device_choose(Grid *g, const char *name, int threads, bool say, Error *err) {
  Device *d = NULL;
  Error why = {""};
  bool any = strcmp(name, "auto") == 0;
  if (any || strcmp(name, "cuda") == 0) d = open_on_all(g, DEVICE_CUDA, threads, any ? &why : err);
  if (!d && !any && strcmp(name, "cuda") == 0) return NULL;
  if (!d) d = open_on_all(g, DEVICE_CPU, threads, err);
  if (!d) return NULL;
  if (say && any)
    log_info("device auto: %s%s%s", device_describe(d), why.msg[0] ? "; " : "", why.msg);
  if (comm_agree(g->all, grid_attach(g, d, err), err) == 0) return d;
  device_close(d);
  return NULL;
}

int precision_choose(const char *name, const Device *d, DType *out, Error *err) {
  bool cuda = device_kind(d) == DEVICE_CUDA;
  if (strcmp(name, "auto") == 0)
    *out = cuda ? DT_BF16 : DT_F32;
  else
    *out = strcmp(name, "bfloat16") == 0 ? DT_BF16 : DT_F32;
  if (*out == DT_F32 || cuda) return 0;
  return error_set(err,
                   "found bfloat16 on the CPU, which computes in float32; expected float32, "
                   "auto, or device cuda");
}

RecomputeChoice recompute_parse(const char *name) {
  RecomputeChoice c = {.how = RECOMPUTE_NONE, .by_memory = strcmp(name, "auto") == 0};
  if (strcmp(name, "full") == 0) c.how = RECOMPUTE_FULL;
  if (strcmp(name, "selective") == 0) c.how = RECOMPUTE_SELECTIVE;
  return c;
}
