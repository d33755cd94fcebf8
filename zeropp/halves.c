/* halves: gradients of one rank summed in BF16, where products write them: the shard itself is the
 * full gradient, of two bytes. What an op adds to in F32 (norms, biases, embeddings) lies in a
 * buffer of the pool while its unit is open, and goes to the shard when it closes, through a sum in
 * F32. A second product into the same gradient adds to the rounded one. */
#include "zeropp/internal.h"

static char *shard_of(const ZeroPP *z, const Unit *u) {
  return engine_part(z, STATE_GRAD, u->shard, 0).data;
}

static Tensor vector_of(const ZeroPP *z, int p, void *unit_buffer, DType type) {
  const ParamPlace *w = &z->place[p];
  return tensor_1d((char *)unit_buffer + (size_t)w->full * dtype_size(type), type, w->numel);
}

void halves_settle(ZeroPP *z, const Unit *u) {
  for (int p = u->first; p < u->first + u->count; p++) {
    Tensor half = vector_of(z, p, shard_of(z, u), DT_BF16);
    if (z->place[p].fresh) device_zero(z->device, half.data, tensor_bytes(half));
    z->place[p].fresh = false;
  }
}

void halves_open(ZeroPP *z, Unit *u) {
  u->grad = pool_take(&z->pool, POOL_GRAD, unit_grad_bytes(u));
}

/* The caller adds in F32. */
Tensor halves_beside(ZeroPP *z, int param, int n) {
  Unit *u = engine_unit(z, z->specs[param].unit);
  for (int p = param; p < param + n; p++) {
    Tensor sum = vector_of(z, p, u->grad, DT_F32);
    if (!z->place[p].beside) device_zero(z->device, sum.data, tensor_bytes(sum));
    z->place[p].beside = true;
  }
  return engine_joined(z, param, n, u->grad, DT_F32);
}

/* The caller overwrites (*beta = 0) or adds to what is there. */
Tensor halves_into(ZeroPP *z, int param, int n, float *beta) {
  Unit *u = engine_unit(z, z->specs[param].unit);
  int fresh = 0;
  for (int p = param; p < param + n; p++) fresh += z->place[p].fresh;
  *beta = fresh == n ? 0 : 1;
  for (int p = param; p < param + n; p++) {
    Tensor half = vector_of(z, p, shard_of(z, u), DT_BF16);
    if (z->place[p].fresh && fresh < n) device_zero(z->device, half.data, tensor_bytes(half));
    z->place[p].fresh = false;
  }
  return engine_joined(z, param, n, shard_of(z, u), DT_BF16);
}

void halves_close(ZeroPP *z, Unit *u) {
  for (int p = u->first; p < u->first + u->count; p++) {
    ParamPlace *w = &z->place[p];
    if (!w->beside) continue;
    Tensor sum = vector_of(z, p, u->grad, DT_F32), half = vector_of(z, p, shard_of(z, u), DT_BF16);
    if (!w->fresh) numbers_add(z, half.data, sum);
    numbers_round(z, sum, half.data);
    w->beside = w->fresh = false;
  }
  halves_settle(z, u);
  pool_give(&z->pool, u->grad);
  u->grad = NULL;
}
