/* Loads a Hugging Face folder. The headers are checked against the parameter table before anything
 * is allocated: every tensor there, its shape and type right, nothing unknown beside. Then each
 * rank reads only the pieces it owns, straight into its masters. */
#include <stdio.h>
#include <string.h>

#include "core/fs.h"
#include "model/internal.h"

/* A folder that was opened: its config, its tensors, where its scalar head is. */
typedef struct Checkpoint {
  const char *dir;
  ModelConfig config;
  json_t *config_json, *generation_json;
  StSet *set;
  char score_weight[64], score_bias[64]; /* "": none */
  bool no_base;                          /* the trunk's tensors lack the family's prefix */
} Checkpoint;

static void checkpoint_close(Checkpoint *c) {
  json_decref(c->config_json);
  json_decref(c->generation_json);
  if (c->set) stset_close(c->set);
}

static int shape_text(char *out, size_t size, int ndim, const int64_t *dim) {
  int n = snprintf(out, size, "[");
  for (int i = 0; i < ndim && n < (int)size; i++)
    n += snprintf(out + n, size - (size_t)n, "%s%lld", i ? ", " : "", (long long)dim[i]);
  return n < (int)size ? n + snprintf(out + n, size - (size_t)n, "]") : n;
}

/* ---- what is there ---- */

static const char *const score_names[] = {"score", "v_head", "value_head", "reward_head",
                                          "classifier"};
static const char *const score_layers[] = {"", ".summary"};
enum { N_SCORE_NAMES = sizeof score_names / sizeof score_names[0] };

static bool is_score_tensor(const char *name) {
  for (size_t i = 0; i < N_SCORE_NAMES; i++) {
    size_t len = strlen(score_names[i]);
    if (!strncmp(name, score_names[i], len) && name[len] == '.') return true;
  }
  return false;
}

static int find_score_head(Checkpoint *c, Error *err) {
  for (size_t i = 0; i < 2 * N_SCORE_NAMES; i++) {
    char weight[64], bias[64];
    snprintf(weight, sizeof weight, "%s%s.weight", score_names[i / 2], score_layers[i % 2]);
    snprintf(bias, sizeof bias, "%s%s.bias", score_names[i / 2], score_layers[i % 2]);
    if (!stset_find(c->set, weight, NULL)) continue;
    if (c->score_weight[0])
      return error_set(err, "%s: two scalar heads, %s and %s", c->dir, c->score_weight, weight);
    strcpy(c->score_weight, weight);
    if (stset_find(c->set, bias, NULL)) strcpy(c->score_bias, bias);
  }
  return 0;
}

static int check_heads(const Checkpoint *c, const ModelOptions *o, Error *err) {
  const char *arch = family_architecture(c->config.family, c->config.head);
  if (o->head == HEAD_LM && c->config.head == HEAD_SCALAR)
    return error_set(err, "%s: %s has no language-model head; expected %s", c->dir, arch,
                     family_architecture(c->config.family, HEAD_LM));
  if (o->head == HEAD_SCALAR && !c->score_weight[0] && !o->init_head)
    return error_set(
        err,
        "%s: no scalar head in this %s (looked for score, v_head, value_head, "
        "reward_head, classifier); expected a reward model, or init_head: true to start one at "
        "random",
        c->dir, arch);
  if (o->head == HEAD_SCALAR && !c->score_weight[0] && c->config.head == HEAD_SCALAR)
    return error_set(err, "%s: tensor score.weight of %s is missing", c->dir, arch);
  return 0;
}

static json_t *read_if_there(const char *dir, const char *name, Error *err, int *rc) {
  char *path = fs_join(dir, name);
  json_t *j = fs_exists(path) ? json_read(path, err) : NULL;
  if (fs_exists(path) && !j) *rc = -1;
  free(path);
  return j;
}

/* ---- the table against the tensors ---- */

/* Trunks are also published without their prefix, "h.0.ln_1.weight" for "transformer.h.0...". */
static bool has_no_base(const Checkpoint *c) {
  const FamilyNames *t = family_of(&c->config)->names;
  char whole[96];
  snprintf(whole, sizeof whole, "%s.weight", t->embedding);
  return !stset_find(c->set, whole, NULL) && stset_find(c->set, whole + strlen(t->base), NULL);
}

/* Where a parameter is in this folder; an empty name: nowhere, a head that starts at random. */
static TensorPlace place_in(const Checkpoint *c, const ParamSpec *s) {
  const char *base = family_of(&c->config)->names->base;
  TensorPlace p = model_place(&c->config, s);
  if (!strcmp(s->name, "score.weight")) snprintf(p.name, sizeof p.name, "%s", c->score_weight);
  if (!strcmp(s->name, "score.bias")) snprintf(p.name, sizeof p.name, "%s", c->score_bias);
  size_t len = strlen(base);
  if (c->no_base && !strncmp(p.name, base, len))
    memmove(p.name, p.name + len, strlen(p.name) - len + 1);
  return p;
}

/* The shape of the tensor that holds the parameter; one dimension with dim[1] = 1. */
static void shape_of(const TensorPlace *p, const ParamSpec *s, int64_t dim[2]) {
  dim[0] = p->in_out ? s->dim[1] : p->rows;
  dim[1] = p->in_out ? p->rows : s->dim[1];
}

static bool shape_fits(const ParamSpec *s, const int64_t dim[2], const StEntry *e) {
  if (e->ndim == s->ndim && e->dim[0] == dim[0] && (s->ndim < 2 || e->dim[1] == dim[1]))
    return true;
  /* Scalar heads also come as [C], their bias as a scalar. */
  bool flat = e->ndim <= 1 && e->numel == s->dim[0] * (s->ndim == 2 ? s->dim[1] : 1);
  return flat && !strncmp(s->name, "score.", 6);
}

static int check_tensor(const Checkpoint *c, const ParamSpec *s, Error *err) {
  const StFile *file;
  TensorPlace p = place_in(c, s);
  if (!p.name[0]) return 0;
  const StEntry *e = stset_find(c->set, p.name, &file);
  if (!e) {
    const char *why = strcmp(p.name, "lm_head.weight") ? "" : " (tie_word_embeddings is false)";
    return error_set(err, "%s: tensor %s is missing%s", c->dir, p.name, why);
  }
  int64_t dim[2];
  shape_of(&p, s, dim);
  if (!shape_fits(s, dim, e)) {
    char found[128], expected[128];
    shape_text(found, sizeof found, e->ndim, e->dim);
    shape_text(expected, sizeof expected, s->ndim, dim);
    return error_set(err, "%s: tensor %s has shape %s; config.json gives %s", st_path(file), p.name,
                     found, expected);
  }
  if (e->dtype != DT_F32 && e->dtype != DT_F16 && e->dtype != DT_BF16)
    return error_set(err, "%s: tensor %s is %s; expected F32, F16 or BF16", st_path(file), p.name,
                     dtype_name(e->dtype));
  return 0;
}

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), k = strlen(end);
  return n >= k && !strcmp(s + n - k, end);
}

static bool may_be_extra(const Checkpoint *c, HeadKind head, const char *name) {
  const FamilyNames *t = family_of(&c->config)->names;
  for (size_t i = 0; i < 2; i++) /* buffers that old versions saved */
    if (t->buffers[i] && ends_with(name, t->buffers[i])) return true;
  if (!strcmp(name, "lm_head.weight")) return head == HEAD_SCALAR || c->config.tied_head;
  return head == HEAD_LM && is_score_tensor(name); /* an actor with a value head beside */
}

static int check_extra(const Checkpoint *c, HeadKind head, int n, const TensorPlace *places,
                       Error *err) {
  for (int i = 0; i < stset_count(c->set); i++) {
    const StFile *file;
    const char *name = stset_entry(c->set, i, &file)->name;
    bool known = may_be_extra(c, head, name);
    for (int k = 0; k < n && !known; k++) known = !strcmp(name, places[k].name);
    if (!known)
      return error_set(err, "%s: unknown tensor %s; a %s has no such parameter", st_path(file),
                       name, family_architecture(c->config.family, head));
  }
  return 0;
}

static int check_tensors(Checkpoint *c, HeadKind head, Error *err) {
  ParamSpec *specs;
  int n = model_specs(&c->config, head, &specs), rc = 0;
  TensorPlace *places = mem_alloc((size_t)n, sizeof *places);
  for (int i = 0; i < n; i++) places[i] = place_in(c, &specs[i]);
  for (int i = 0; i < n && !rc; i++) rc = check_tensor(c, &specs[i], err);
  if (!rc) rc = check_extra(c, head, n, places, err);
  free(places);
  free(specs);
  return rc;
}

static int checkpoint_open(Checkpoint *c, const char *dir, const ModelOptions *o, Error *err) {
  int rc = 0;
  *c = (Checkpoint){.dir = dir};
  if (!fs_is_dir(dir)) return error_set(err, "%s: no such folder", dir);
  if (model_config_read(dir, &c->config, err)) return -1;
  c->config_json = read_if_there(dir, "config.json", err, &rc);
  c->generation_json = read_if_there(dir, "generation_config.json", err, &rc);
  if (rc || !(c->set = stset_open(dir, err)) || find_score_head(c, err) || check_heads(c, o, err))
    return -1;
  c->config.score_bias = c->score_bias[0] != 0;
  c->no_base = has_no_base(c);
  return check_tensors(c, o->head, err);
}

/* ---- values ---- */

typedef struct Source {
  const StFile *file;
  const StEntry *entry;
  Error *err;
} Source;

static int read_run(void *ctx, int64_t at, int64_t n, float *x) {
  const Source *s = ctx;
  return st_read_f32(s->file, s->entry, at, n, x, s->err);
}

static int read_params(Model *m, const Checkpoint *c, const ModelOptions *o, Error *err) {
  for (int i = 0; i < zeropp_n_params(m->zero); i++) {
    const ParamSpec *spec = zeropp_spec(m->zero, i);
    TensorPlace p = place_in(c, spec);
    if (!p.name[0]) {
      zeropp_init_param(m->zero, i, o->seed);
      continue;
    }
    int64_t start, count;
    float *w = zeropp_shard(m->zero, STATE_MASTER, i, &start, &count);
    Source source = {.err = err};
    source.entry = stset_find(c->set, p.name, &source.file);
    if (place_read(&p, spec, start, count, w, read_run, &source)) return -1;
    zeropp_shard_written(m->zero, STATE_MASTER, i);
  }
  return 0;
}

/* A head that is tied but saved all the same must be the embedding: otherwise one of the two would
 * be thrown away unseen. Each rank compares the piece it owns, a little at a time. */
static int check_tied_copy(Model *m, const Checkpoint *c, Error *err) {
  enum { PIECE = 1 << 16 };
  const StFile *file;
  const StEntry *e = stset_find(c->set, "lm_head.weight", &file);
  if (!e || !head_is_tied(m)) return 0;
  int64_t start, count;
  const float *w = zeropp_shard(m->zero, STATE_MASTER, m->params.embedding, &start, &count);
  bool same = e->numel == (int64_t)m->config.vocab_size * embed_width(&m->config);
  float *piece = mem_alloc(PIECE, sizeof(float));
  for (int64_t at = 0; same && at < count; at += PIECE) {
    int64_t n = count - at < PIECE ? count - at : PIECE;
    if (st_read_f32(file, e, start + at, n, piece, err)) {
      free(piece);
      return -1;
    }
    same = !memcmp(piece, w + at, (size_t)n * sizeof(float));
  }
  free(piece);
  if (same) return 0;
  return error_set(err,
                   "%s: lm_head.weight differs from %s.weight, but tie_word_embeddings is true",
                   st_path(file), family_of(&m->config)->names->embedding);
}

int model_check(const char *dir, const ModelOptions *o, ModelConfig *out, Error *err) {
  Checkpoint c;
  int rc = checkpoint_open(&c, dir, o, err);
  if (!rc) *out = c.config;
  checkpoint_close(&c);
  return rc;
}

Model *model_load(Device *d, Grid *g, Arena *arena, const char *dir, const ModelOptions *o,
                  Error *err) {
  Checkpoint c;
  int rc = checkpoint_open(&c, dir, o, err);
  if (comm_agree(g->all, rc, err)) {
    checkpoint_close(&c);
    return NULL;
  }
  Model *m = model_new(d, g, arena, &c.config, o);
  m->source_config = json_incref(c.config_json);
  m->source_generation = json_incref(c.generation_json);
  rc = read_params(m, &c, o, err);
  if (!rc) rc = check_tied_copy(m, &c, err);
  checkpoint_close(&c);
  if (comm_agree(g->all, rc, err)) {
    model_free(m);
    return NULL;
  }
  zeropp_weights_written(m->zero);
  return m;
}
