/* Reading fixtures, loading their models, recording figures. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/parity.h"

/* ---- the reference ---- */

static const StEntry *entry(const Parity *p, const char *name, const StFile **file) {
  const StEntry *e = stset_find(p->reference, name, file);
  if (!e) die("%s/reference.safetensors: tensor %s is missing", p->dir, name);
  return e;
}

bool parity_has(const Parity *p, const char *name) {
  return stset_find(p->reference, name, NULL) != NULL;
}

float *parity_f32(const Parity *p, const char *name, int64_t n) {
  const StFile *file;
  const StEntry *e = entry(p, name, &file);
  if (n >= 0 && e->numel != n)
    die("%s/reference.safetensors: %s has %lld elements; expected %lld", p->dir, name,
        (long long)e->numel, (long long)n);
  float *x = mem_alloc((size_t)e->numel, sizeof *x);
  Error err = {""};
  if (st_read_f32(file, e, 0, e->numel, x, &err)) die("%s", err.msg);
  return x;
}

int32_t *parity_i32(const Parity *p, const char *name, int64_t *n) {
  const StFile *file;
  const StEntry *e = entry(p, name, &file);
  int32_t *x = mem_alloc((size_t)e->numel, sizeof *x);
  Error err = {""};
  if (st_read_i32(file, e, 0, e->numel, x, &err)) die("%s", err.msg);
  if (n) *n = e->numel;
  return x;
}

/* ---- figures ---- */

static double widened(const Parity *p, double limit) {
  bool gradient = limit == PARITY_GRADIENT;
  if (p->compute == DT_BF16 && gradient) return p->kinks ? PARITY_BF16_KINKS : PARITY_BF16_GRADIENT;
  if (p->compute == DT_BF16) return PARITY_BF16_VALUE;
  return device_kind(p->device) == DEVICE_CUDA ? PARITY_GPU : limit;
}

static Figure *figure_of(Parity *p, const char *figure, double limit) {
  int i = 0;
  while (i < p->n_figures && strcmp(p->figure[i].name, figure) != 0) i++;
  Figure *f = &p->figure[i];
  if (i == p->n_figures) {
    require(p->n_figures < (int)(sizeof p->figure / sizeof p->figure[0]));
    *f = (Figure){.limit = limit > 0 ? widened(p, limit) : 0, .error = -1};
    snprintf(f->name, sizeof f->name, "%s", figure);
    p->n_figures++;
  }
  return f;
}

static void record(Parity *p, const char *figure, double limit, double error, const char *what) {
  Figure *f = figure_of(p, figure, limit);
  if (isnan(error)) error = INFINITY;
  if (error > f->error) {
    f->error = error;
    snprintf(f->worst, sizeof f->worst, "%s", what);
  }
}

static double largest(const float *x, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; i++)
    if (!(fabs((double)x[i]) <= most)) most = fabs((double)x[i]);
  return most;
}

static double difference(const float *a, const float *b, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; i++) {
    double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= most)) most = d; /* NaN sticks */
  }
  return most;
}

/* Where the reference is all zero, the difference itself is the error. */
static double relative(double diff, double scale) { return scale > 0 ? diff / scale : diff; }

void parity_compare(Parity *p, const char *figure, double limit, const float *got,
                    const float *want, int64_t n, const char *what) {
  record(p, figure, limit, relative(difference(got, want, n), largest(want, n)), what);
}

void parity_check(Parity *p, const char *figure, double limit, const float *got, const char *tensor,
                  int64_t n) {
  float *want = parity_f32(p, tensor, n);
  parity_compare(p, figure, limit, got, want, n, tensor);
  free(want);
}

void parity_pool(Parity *p, const char *figure, const float *got, const char *tensor, int64_t n) {
  Figure *f = figure_of(p, figure, PARITY_VALUE);
  float *want = parity_f32(p, tensor, n);
  double diff = difference(got, want, n), scale = largest(want, n);
  if (isnan(diff)) diff = INFINITY;
  if (diff >= f->diff) {
    f->diff = diff;
    snprintf(f->worst, sizeof f->worst, "%s", tensor);
  }
  if (scale > f->scale) f->scale = scale;
  f->error = relative(f->diff, f->scale);
  free(want);
}

void parity_mean(Parity *p, const char *figure, double got, double largest_term) {
  float *want = parity_f32(p, figure, 1);
  record(p, figure, PARITY_VALUE, relative(fabs(got - (double)want[0]), largest_term), figure);
  free(want);
}

/* The elements of a parameter in its reference tensor. */
static float *reference_of(const float *tensor, const TensorPlace *at, const ParamSpec *s) {
  int64_t rows = s->dim[0], in = s->dim[1];
  float *x = mem_alloc((size_t)(rows * in), sizeof *x);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < in; c++) {
      int64_t row = at->first + r;
      x[r * in + c] = at->in_out ? tensor[c * at->rows + row] : tensor[row * in + c];
    }
  return x;
}

/* What a parameter's differences are measured by: its tensor's largest magnitude. Adding to all
 * keys changes no attention, unless positions turn them: such a bias has a gradient of exactly 0,
 * of which rounding is left, and is measured by its queries' bias. */
static double scale_of(const Parity *p, const Model *m, const char *name, const float *tensor,
                       int64_t n) {
  char other[192];
  snprintf(other, sizeof other, "%s", name);
  char *key = strstr(other, "k_proj.bias");
  if (model_config(m)->rope != ROPE_NONE || !key) return largest(tensor, n);
  *key = 'q';
  float *queries = parity_f32(p, other, n);
  double scale = largest(queries, n);
  free(queries);
  return scale;
}

/* Weights are compared as vectors: length of the difference, and of the reference as scale. AdamW
 * moves a weight by the learning rate times its gradient over the gradient's own size: of one whose
 * gradient cancels to nothing, rounding says where it goes, by up to the learning rate. Single
 * such weights differ between any two orders of summing (PyTorch's own, with other threads). */
static double distance(const Parity *p, const float *got, const float *want, int64_t start,
                       int64_t count, const ParamSpec *s, double *scale) {
  double sum[2] = {0, 0};
  for (int64_t i = 0; i < count; i++) {
    double d = (double)got[i] - (double)want[start + i];
    sum[0] += d * d;
  }
  comm_all_reduce_f64(p->grid->all, sum, 1, false);
  for (int64_t i = 0; i < s->dim[0] * s->dim[1]; i++) sum[1] += (double)want[i] * (double)want[i];
  *scale = sqrt(sum[1]);
  return sqrt(sum[0]);
}

void parity_params(Parity *p, const char *figure, Model *m, StateKind kind, const char *prefix) {
  ZeroPP *z = model_zero(m);
  const ModelConfig *c = model_config(m);
  p->kinks = c->mlp == MLP_PLAIN && c->activation == ACT_RELU;
  for (int i = 0; i < zeropp_n_params(z); i++) {
    const ParamSpec *s = zeropp_spec(z, i);
    TensorPlace at = model_place(c, s);
    char name[160];
    snprintf(name, sizeof name, "%s%s", prefix, at.name);
    int64_t numel = at.rows * s->dim[1], start, count;
    float *tensor = parity_f32(p, name, numel);
    float *want = reference_of(tensor, &at, s);
    const float *got = zeropp_shard(z, kind, i, &start, &count);
    double diff = count > 0 ? difference(got, want + start, count) : 0;
    double scale = scale_of(p, m, name, tensor, numel);
    if (kind == STATE_MASTER) diff = distance(p, got, want, start, count, s, &scale);
    if (isnan(diff)) diff = INFINITY;
    comm_all_reduce_f64(p->grid->all, &diff, 1, true);
    record(p, figure, PARITY_GRADIENT, relative(diff, scale), s->name);
    free(want);
    free(tensor);
  }
}

void parity_agree(Parity *p, const char *figure, bool same) {
  if (p->compute != DT_BF16) record(p, figure, 0, same ? 0 : INFINITY, "");
}

/* ---- models ---- */

Model *parity_load(Parity *p, const char *dir, HeadKind head, Error *err) {
  ModelOptions o = {.head = head, .trainable = true, .zero = {.stage = 3, .compute = p->compute}};
  return model_load(p->device, p->grid, p->arena, dir, &o, err);
}

static void copy_into(const char *from, const char *dir, const char *name) {
  Error err = {""};
  char *to = fs_join(dir, name);
  if (fs_copy(from, to, &err)) die("%s", err.msg);
  free(to);
}

char *parity_folder(Parity *p, const char *config, const char *weights) {
  char name[64] = "/tmp/rlhf-parity-XXXXXX";
  if (p->grid->rank == 0) {
    if (!mkdtemp(name)) die("cannot make a folder under /tmp");
    copy_into(config, name, "config.json");
    copy_into(weights, name, "model.safetensors");
  }
  comm_broadcast(p->grid->all, name, sizeof name, 0);
  comm_barrier(p->grid->all);
  return mem_strdup(name);
}

/* ---- sequences ---- */

Sequences parity_sequences(const Parity *p) {
  Sequences s = {.offsets = mem_zalloc(1, sizeof(int32_t))};
  for (;; s.n++) {
    char name[32];
    snprintf(name, sizeof name, "seq%d.input_ids", s.n);
    if (!parity_has(p, name)) break;
    int64_t len;
    int32_t *ids = parity_i32(p, name, &len);
    int32_t first = s.offsets[s.n];
    s.offsets = mem_grow(s.offsets, (size_t)s.n + 2, sizeof(int32_t));
    s.offsets[s.n + 1] = first + (int32_t)len;
    s.tokens = mem_grow(s.tokens, (size_t)first + (size_t)len, sizeof(int32_t));
    memcpy(s.tokens + first, ids, (size_t)len * sizeof(int32_t));
    free(ids);
  }
  if (s.n == 0) die("%s/reference.safetensors: no seq0.input_ids", p->dir);
  return s;
}

void sequences_free(Sequences *s) {
  free(s->offsets);
  free(s->tokens);
}

Batch sequences_batch(const Sequences *s) {
  return (Batch){.n_seqs = s->n, .offsets = s->offsets, .tokens = s->tokens};
}
