/* optimizer: AdamW on the shards this rank owns, the moving average, copies between models.
 *
 * Whether a step happens is one decision of all ranks, from one number that all of them know: the
 * squared norm, which is not finite if any gradient anywhere is not.
 */
#include <math.h>
#include <string.h>

#include "zeropp/internal.h"

/* In double, so that another number of ranks changes it in the last bits of a double only. What all
 * have is counted once. */
static double grad_norm(const ZeroPP *z) {
  double sum = z->ops->sum_squares(z->device, engine_shard(z, STATE_GRAD));
  if (z->whole)
    comm_broadcast(z->grid->all, &sum, sizeof sum, 0);
  else
    comm_all_reduce_f64(z->grid->all, &sum, 1, false);
  return sqrt(sum);
}

/* Where the elements lie that this rank updates: its own, or all where the model is whole. */
static int64_t updated(const ZeroPP *z, int p, int64_t *count) {
  const ParamPlace *w = &z->place[p];
  *count = z->whole ? w->numel : w->count;
  return z->whole ? w->shard - w->start : w->shard;
}

/* Parameters first to last - 1, one call for each run of neighbours with the same weight decay.
 * Gaps between them stay zero. */
static void update(ZeroPP *z, AdamW adam, int first, int last) {
  for (int p = first, next; p < last; p = next) {
    int64_t count, at = updated(z, p, &count), end = at + count;
    bool decay = z->specs[p].decay;
    for (next = p + 1; next < last && z->specs[next].decay == decay; next++) {
      end = updated(z, next, &count);
      end += count;
    }
    AdamW a = adam;
    if (!decay) a.weight_decay = 0;
    Tensor out = {0};
    if (z->rounded) out = tensor_1d(z->rounded + 2 * at, DT_BF16, end - at);
    z->ops->adamw(z->device, a, engine_part(z, STATE_MASTER, at, end - at),
                  engine_part(z, STATE_GRAD, at, end - at),
                  engine_part(z, STATE_MOMENT1, at, end - at),
                  engine_part(z, STATE_MOMENT2, at, end - at), out);
  }
}

/* The first units travel while the others are updated: the next pass, forward or a rollout, wants
 * them first, and the network has nothing else to do. */
static void update_all(ZeroPP *z, AdamW adam) {
  int done = 0, early = gather_early_units(z);
  for (int i = 0; i < early; i++) {
    int end = z->units[i].first + z->units[i].count;
    update(z, adam, done, end);
    zeropp_prefetch(z, i);
    done = end;
  }
  update(z, adam, done, z->n_params);
}

StepResult zeropp_step(ZeroPP *z, AdamW p, float max_norm) {
  require(z->cfg.trainable);
  engine_require_closed(z, "step");
  engine_require_sharded(z, "step");
  reduce_finish(z);
  StepResult result = {.grad_norm = grad_norm(z)};
  result.skipped = !isfinite(result.grad_norm);
  if (result.skipped) { /* errors of a gradient that was thrown away correct nothing */
    reduce_forget_errors(z);
    return result;
  }
  double clip = max_norm > 0 ? (double)max_norm / (result.grad_norm + 1e-6) : 1;
  p.grad_scale = clip < 1 ? (float)clip : 1;
  p.t = ++z->steps;
  gather_before_step(z);
  gather_new_version(z);
  z->rounded_version = z->version;
  update_all(z, p);
  if (z->cfg.error_reset > 0 && z->steps % z->cfg.error_reset == 0) reduce_forget_errors(z);
  return result;
}

int64_t zeropp_steps(const ZeroPP *z) { return z->steps; }

void zeropp_ema_enable(ZeroPP *z) {
  require(!z->shard[STATE_EMA]);
  engine_add_kind(z, STATE_EMA);
  gather_restore_master(z);
  device_copy(z->device, z->shard[STATE_EMA], z->shard[STATE_MASTER],
              tensor_bytes(engine_shard(z, STATE_MASTER)));
}

void zeropp_ema_update(ZeroPP *z, float decay) {
  require(zeropp_has_ema(z));
  z->ops->lerp(z->device, decay, engine_shard(z, STATE_MASTER), engine_shard(z, STATE_EMA));
}

bool zeropp_has_ema(const ZeroPP *z) { return z->shard[STATE_EMA] != NULL; }

static bool same_specs(const ZeroPP *a, const ZeroPP *b) {
  if (a->n_params != b->n_params) return false;
  for (int p = 0; p < a->n_params; p++) {
    const ParamSpec *x = &a->specs[p], *y = &b->specs[p];
    if (strcmp(x->name, y->name) != 0 || x->unit != y->unit || x->ndim != y->ndim ||
        x->joined != y->joined || memcmp(x->dim, y->dim, (size_t)x->ndim * sizeof x->dim[0]) != 0)
      return false;
  }
  return true;
}

void zeropp_copy_weights(ZeroPP *to, ZeroPP *from) {
  require(same_specs(to, from));
  require(to->grid->nodes == from->grid->nodes && to->grid->local == from->grid->local);
  require(to->cut == from->cut && to->whole == from->whole);
  gather_restore_master(to);
  gather_restore_master(from);
  require(device_kind(to->device) == device_kind(from->device));
  if (to->device != from->device) device_sync(from->device);
  device_copy(to->device, to->shard[STATE_MASTER], from->shard[STATE_MASTER],
              tensor_bytes(engine_shard(to, STATE_MASTER)));
  zeropp_weights_written(to);
}
