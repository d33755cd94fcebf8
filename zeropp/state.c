/* state: this rank's part of every parameter, random weights, and the training state in a file.
 *
 * The file holds full tensors, so that any number of ranks can read what any other wrote; each rank
 * writes and reads its own pieces only. All ranks agree on errors before they go on, so that none
 * waits for one that has given up.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "zeropp/internal.h"

static const char *const kind_name[STATE_KINDS] = {"master", "moment1", "moment2", "gradient",
                                                   "ema"};
static const char counters_name[] = "zeropp/counters"; /* I32 [2]: format, steps taken */
enum { STATE_FORMAT = 1, PARALLEL_MIN = 1 << 16 };

/* ---- host copies ---- */

static bool is_host_memory(const ZeroPP *z, StateKind kind) {
  return device_kind(z->device) == DEVICE_CPU || engine_offloads(z, kind);
}

static Tensor own_part(const ZeroPP *z, StateKind kind, int param) {
  return engine_part(z, kind, z->place[param].shard, z->place[param].count);
}

/* Room for n numbers in the host's memory. */
static float *view_of(ZeroPP *z, StateKind kind, size_t n) {
  if (n * sizeof(float) > z->view_bytes[kind]) {
    free(z->view[kind]);
    z->view[kind] = mem_alloc(n, sizeof(float));
    z->view_bytes[kind] = n * sizeof(float);
  }
  return z->view[kind];
}

static float *download_view(ZeroPP *z, StateKind kind, int param) {
  Tensor x = own_part(z, kind, param);
  size_t n = (size_t)tensor_numel(x);
  view_of(z, kind, n);
  if (x.dtype == DT_F32) {
    device_download(z->device, z->view[kind], x.data, tensor_bytes(x));
    return z->view[kind];
  }
  void *raw = mem_alloc(n, dtype_size(x.dtype));
  device_download(z->device, raw, x.data, tensor_bytes(x));
  convert_to_f32(raw, x.dtype, z->view[kind], n);
  free(raw);
  return z->view[kind];
}

static void upload_view(ZeroPP *z, StateKind kind, int param) {
  Tensor x = own_part(z, kind, param);
  size_t n = (size_t)tensor_numel(x);
  require(z->view_bytes[kind] >= n * sizeof(float));
  if (x.dtype == DT_F32) {
    device_upload(z->device, x.data, z->view[kind], tensor_bytes(x));
    return;
  }
  void *raw = mem_alloc(n, dtype_size(x.dtype));
  convert_from_f32(z->view[kind], raw, x.dtype, n);
  device_upload(z->device, x.data, raw, tensor_bytes(x));
  free(raw);
}

void state_drop_views(ZeroPP *z) {
  for (int k = 0; k < STATE_KINDS; k++) {
    free(z->view[k]);
    z->view[k] = NULL;
    z->view_bytes[k] = 0;
  }
}

float *zeropp_shard(ZeroPP *z, StateKind kind, int param, int64_t *start, int64_t *count) {
  require(kind >= 0 && kind < STATE_KINDS && param >= 0 && param < z->n_params);
  if (kind == STATE_MASTER) gather_restore_master(z);
  if (kind == STATE_GRAD && z->shard[kind]) reduce_finish(z);
  if (!z->shard[kind])
    die("%s of %s: this model keeps none", kind_name[kind], z->specs[param].name);
  const ParamPlace *w = &z->place[param];
  *start = w->start;
  *count = w->count;
  if (w->count == 0) return NULL;
  if (!is_host_memory(z, kind)) return download_view(z, kind, param);
  device_sync(z->device);
  return own_part(z, kind, param).data;
}

void zeropp_shard_written(ZeroPP *z, StateKind kind, int param) {
  require(z->shard[kind] && param >= 0 && param < z->n_params);
  if (is_host_memory(z, kind) || z->place[param].count == 0) return;
  upload_view(z, kind, param);
}

uint64_t zeropp_version(const ZeroPP *z) { return z->version; }

void zeropp_weights_written(ZeroPP *z) {
  engine_require_sharded(z, "new weights");
  state_drop_views(z);
  if (z->cfg.stage == 0) gather_replicate(z, STATE_MASTER);
  if (z->delta) delta_forget(z);
  gather_new_version(z);
}

/* n of a parameter's weights, from element `start` of it on. */
static void init_some(const ParamSpec *s, uint64_t seed, int64_t start, int64_t n, float *w) {
  if (s->init == INIT_NORMAL) rng_normals(seed, rng_hash(s->name), (uint64_t)start, n, w);
  for (int64_t i = 0; i < n; i++) {
    if (s->init == INIT_NORMAL)
      w[i] = s->init_std * w[i];
    else
      w[i] = s->init == INIT_ONES ? 1 : 0;
  }
}

void zeropp_init_param(ZeroPP *z, int p, uint64_t seed) {
  require(p >= 0 && p < z->n_params);
  const int64_t some = 4096, start = z->place[p].start, count = z->place[p].count;
  gather_restore_master(z);
  if (count == 0) return;
  bool here = is_host_memory(z, STATE_MASTER);
  if (here) device_sync(z->device);
  float *w = here ? own_part(z, STATE_MASTER, p).data : view_of(z, STATE_MASTER, (size_t)count);
#pragma omp parallel for num_threads(device_threads(z->device)) \
    schedule(static) if (count > PARALLEL_MIN)
  for (int64_t at = 0; at < count; at += some)
    init_some(&z->specs[p], seed, start + at, count - at < some ? count - at : some, w + at);
  zeropp_shard_written(z, STATE_MASTER, p);
}

void zeropp_init_random(ZeroPP *z, uint64_t seed) {
  for (int p = 0; p < z->n_params; p++) zeropp_init_param(z, p, seed);
  zeropp_weights_written(z);
}

/* Elements start .. start + count of what repeats x. */
static void repeat(Device *d, const float *x, int64_t n, int64_t start, int64_t count, float *w) {
#pragma omp parallel for num_threads(device_threads(d)) schedule(static) if (count > PARALLEL_MIN)
  for (int64_t first = 0; first < count; first += PARALLEL_MIN) {
    int64_t end = count - first < PARALLEL_MIN ? count : first + PARALLEL_MIN;
    int64_t at = (start + first) % n;
    for (int64_t i = first; i < end; i++, at = at + 1 < n ? at + 1 : 0) w[i] = x[at];
  }
}

/* On a device with its own memory what is there already is doubled until all is. */
void zeropp_init_repeated(ZeroPP *z, int p, const float *x, int64_t n) {
  enum { FEW = 64 }; /* not worth a copy */
  require(p >= 0 && p < z->n_params && n > 0);
  const int64_t start = z->place[p].start, count = z->place[p].count;
  gather_restore_master(z);
  if (count == 0) return;
  bool here = is_host_memory(z, STATE_MASTER);
  if (here) device_sync(z->device);
  Tensor own = own_part(z, STATE_MASTER, p);
  require(own.dtype == DT_F32);
  int64_t once = n < FEW ? FEW / n * n : n;
  if (here || once > count) once = count;
  float *w = here ? own.data : view_of(z, STATE_MASTER, (size_t)once);
  repeat(z->device, x, n, start, once, w);
  if (here) return;
  char *to = own.data;
  device_upload(z->device, to, w, (size_t)once * sizeof *w);
  for (int64_t done = once, more; done < count; done += more) {
    more = done < count - done ? done : count - done;
    device_copy(z->device, to + (size_t)done * sizeof *w, to, (size_t)more * sizeof *w);
  }
}

/* ---- files ---- */

/* Gradients live within a step and are not part of the state. */
static bool is_saved(const ZeroPP *z, StateKind kind) {
  return z->shard[kind] && kind != STATE_GRAD;
}

static void entry_name(char *out, size_t size, StateKind kind, const ParamSpec *s) {
  snprintf(out, size, "%s/%s", kind_name[kind], s->name);
}

/* The same layout on every rank: kinds in order, parameters in order. */
static void add_entries(const ZeroPP *z, StWriter *w) {
  char name[128];
  stw_add(w, counters_name, DT_I32, 1, (const int64_t[]){2});
  for (StateKind k = 0; k < STATE_KINDS; k++) {
    if (!is_saved(z, k)) continue;
    for (int p = 0; p < z->n_params; p++) {
      entry_name(name, sizeof name, k, &z->specs[p]);
      stw_add(w, name, DT_F32, z->specs[p].ndim, z->specs[p].dim);
    }
  }
  state_refresh_add(z, w);
  state_error_add(z, w);
}

static int write_pieces(ZeroPP *z, StWriter *w, Error *err) {
  int index = 0, rc = 0;
  int32_t counters[2] = {STATE_FORMAT, (int32_t)z->steps};
  if (z->grid->rank == 0) rc = stw_write_i32(w, index, 0, 2, counters, err);
  for (StateKind k = 0; k < STATE_KINDS; k++) {
    if (!is_saved(z, k)) continue;
    for (int p = 0; p < z->n_params; p++) {
      int64_t start, count;
      const float *x = zeropp_shard(z, k, p, &start, &count);
      index++;
      if (rc == 0 && count) rc = stw_write_f32(w, index, start, count, x, err);
    }
  }
  index++;
  if (rc == 0) rc = state_refresh_write(z, w, index, err);
  return rc ? rc : state_error_write(z, w, index + delta_keeps_rules(z), err);
}

int zeropp_save_state(ZeroPP *z, const char *path, Error *err) {
  Comm *all = z->grid->all;
  bool root = z->grid->rank == 0;
  require(z->steps <= INT32_MAX);
  gather_restore_master(z);
  if (delta_keeps_rules(z)) gather_settle(z);
  StWriter *w = stw_begin(path);
  add_entries(z, w);
  int rc = comm_agree(all, root ? stw_create(w, err) : 0, err);
  bool created = rc == 0;
  if (rc == 0) rc = comm_agree(all, stw_open(w, err), err);
  if (rc == 0) rc = comm_agree(all, write_pieces(z, w, err), err);
  int closed = stw_close(w, rc ? NULL : err);
  state_drop_views(z);
  rc = comm_agree(all, rc ? rc : closed, err);
  if (rc && created && root) remove(path);
  return rc;
}

static int check_entry(const ZeroPP *z, const StFile *f, StateKind k, int p, Error *err) {
  char name[128];
  const ParamSpec *s = &z->specs[p];
  entry_name(name, sizeof name, k, s);
  const StEntry *e = st_find(f, name);
  if (!e) return error_set(err, "%s: no tensor %s", st_path(f), name);
  if (e->dtype != DT_F32)
    return error_set(err, "%s: %s is %s, expected F32", st_path(f), name, dtype_name(e->dtype));
  if (e->ndim != s->ndim || memcmp(e->dim, s->dim, (size_t)s->ndim * sizeof s->dim[0]) != 0)
    return error_set(
        err, "%s: %s has %d dimension(s) and %lld elements, the model's has %d and %lld",
        st_path(f), name, e->ndim, (long long)e->numel, s->ndim, (long long)z->place[p].numel);
  return 0;
}

/* A state of another model, or of a run with other switches, is refused before anything changes. */
static int check_file(const ZeroPP *z, const StFile *f, Error *err) {
  const StEntry *e = st_find(f, counters_name);
  int32_t counters[2];
  int expected = 1 + state_error_entries(f) + state_refresh_entries(f);
  if (!e || e->numel != 2)
    return error_set(err, "%s: no tensor %s [2]: not a training state", st_path(f), counters_name);
  if (st_read_i32(f, e, 0, 2, counters, err)) return -1;
  if (counters[0] != STATE_FORMAT)
    return error_set(err, "%s: state format %d, expected %d", st_path(f), counters[0],
                     STATE_FORMAT);
  if (counters[1] < 0) return error_set(err, "%s: %d steps taken", st_path(f), counters[1]);
  for (StateKind k = 0; k < STATE_KINDS; k++) {
    if (!is_saved(z, k)) continue;
    expected += z->n_params;
    for (int p = 0; p < z->n_params; p++)
      if (check_entry(z, f, k, p, err)) return -1;
  }
  if (st_count(f) != expected)
    return error_set(err, "%s: %d tensors, this model's state has %d%s", st_path(f), st_count(f),
                     expected, zeropp_has_ema(z) ? "" : " (no moving average)");
  return state_refresh_check(z, f, err);
}

static int read_pieces(ZeroPP *z, const StFile *f, Error *err) {
  char name[128];
  int32_t counters[2];
  for (StateKind k = 0; k < STATE_KINDS; k++) {
    if (!is_saved(z, k)) continue;
    for (int p = 0; p < z->n_params; p++) {
      int64_t start, count;
      float *x = zeropp_shard(z, k, p, &start, &count);
      entry_name(name, sizeof name, k, &z->specs[p]);
      if (count && st_read_f32(f, st_find(f, name), start, count, x, err)) return -1;
      zeropp_shard_written(z, k, p);
    }
  }
  if (st_read_i32(f, st_find(f, counters_name), 0, 2, counters, err)) return -1;
  z->steps = counters[1];
  if (state_refresh_read(z, f, err)) return -1;
  return state_error_read(z, f, err);
}

/* Stage 0: everybody has what everybody read. The masters follow when they are declared written. */
static void share_pieces(ZeroPP *z) {
  for (StateKind k = 0; k < STATE_KINDS; k++)
    if (is_saved(z, k) && k != STATE_MASTER) gather_replicate(z, k);
}

int zeropp_load_state(ZeroPP *z, const char *path, Error *err) {
  Comm *all = z->grid->all;
  engine_require_sharded(z, "load");
  gather_restore_master(z);
  StFile *f = st_open(path, err);
  int rc = comm_agree(all, f ? check_file(z, f, err) : -1, err);
  if (rc == 0) rc = comm_agree(all, read_pieces(z, f, err), err);
  if (rc == 0 && z->cfg.stage == 0) share_pieces(z);
  if (rc == 0) zeropp_weights_written(z);
  if (f) st_close(f);
  return rc;
}
