/* Writes a Hugging Face folder. Tensors are dealt to files of at most max_shard_bytes in table
 * order; every rank writes its own pieces of every file, so that no rank gathers anything. All
 * happens in DIR.tmp, which is renamed when whole: after an error, on any rank, nothing is left. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/fs.h"
#include "model/internal.h"

typedef struct SavedTensor {
  char name[96];
  int ndim, file;
  int64_t dim[2], numel;
} SavedTensor;

typedef struct SavePlan {
  Model *m;
  const SaveOptions *o;
  char *tmp; /* the folder being written */
  int n_files, n_tensors;
  SavedTensor *tensor; /* [n_tensors], in table order */
  int *tensor_of;      /* [n_params]: the tensor that holds the parameter */
} SavePlan;

static TensorPlace place_of(const SavePlan *p, int param) {
  return model_place(&p->m->config, zeropp_spec(p->m->zero, param));
}

/* Parameters of one tensor follow each other in the table. */
static void plan_tensors(SavePlan *p) {
  int n = zeropp_n_params(p->m->zero);
  p->tensor = mem_alloc((size_t)n, sizeof *p->tensor);
  p->tensor_of = mem_alloc((size_t)n, sizeof *p->tensor_of);
  for (int i = 0; i < n; i++) {
    const ParamSpec *s = zeropp_spec(p->m->zero, i);
    TensorPlace at = place_of(p, i);
    bool next = p->n_tensors == 0 || strcmp(p->tensor[p->n_tensors - 1].name, at.name) != 0;
    if (next) {
      SavedTensor *t = &p->tensor[p->n_tensors++];
      *t = (SavedTensor){.ndim = s->ndim, .dim = {at.rows, s->ndim == 2 ? s->dim[1] : 1}};
      snprintf(t->name, sizeof t->name, "%s", at.name);
      t->numel = t->dim[0] * t->dim[1];
      if (at.in_out) {
        t->dim[0] = s->dim[1];
        t->dim[1] = at.rows;
      }
    }
    p->tensor_of[i] = p->n_tensors - 1;
  }
}

static void plan_files(SavePlan *p) {
  uint64_t limit = p->o->max_shard_bytes, used = 0;
  p->n_files = 1;
  for (int i = 0; i < p->n_tensors; i++) {
    uint64_t bytes = (uint64_t)p->tensor[i].numel * dtype_size(p->o->dtype);
    if (limit && used && used + bytes > limit) {
      p->n_files++;
      used = 0;
    }
    p->tensor[i].file = p->n_files - 1;
    used += bytes;
  }
}

static void file_name(const SavePlan *p, int file, char out[64]) {
  if (p->n_files == 1)
    snprintf(out, 64, "model.safetensors");
  else
    snprintf(out, 64, "model-%05d-of-%05d.safetensors", file + 1, p->n_files);
}

/* ---- tensors ---- */

/* A finite weight that the narrower type has no number for would silently become infinite. */
static int check_range(const ParamSpec *s, DType dtype, const float *w, int64_t n, Error *err) {
  const float most = 65504.0F;
  if (dtype != DT_F16) return 0;
  for (int64_t i = 0; i < n; i++)
    if (isfinite(w[i]) && fabsf(w[i]) > most)
      return error_set(err, "tensor %s holds %g, which float16 cannot; save as bfloat16 or float32",
                       s->name, (double)w[i]);
  return 0;
}

typedef struct Target {
  StWriter *w;
  int index; /* of the tensor in its file */
  Error *err;
} Target;

static int write_run(void *ctx, int64_t at, int64_t n, float *x) {
  const Target *t = ctx;
  return stw_write_f32(t->w, t->index, at, n, x, t->err);
}

static int write_pieces(SavePlan *p, int file, StWriter *w, Error *err) {
  ZeroPP *z = p->m->zero;
  int first = 0; /* tensor of the file */
  while (p->tensor[first].file != file) first++;
  for (int i = 0; i < zeropp_n_params(z); i++) {
    int tensor = p->tensor_of[i];
    if (p->tensor[tensor].file != file) continue;
    const ParamSpec *s = zeropp_spec(z, i);
    TensorPlace at = place_of(p, i);
    Target target = {.w = w, .index = tensor - first, .err = err};
    int64_t start, count;
    const float *x = zeropp_shard(z, p->o->kind, i, &start, &count);
    if (check_range(s, p->o->dtype, x, count, err) ||
        place_write(&at, s, start, count, x, write_run, &target))
      return -1;
  }
  return 0;
}

static StWriter *layout_file(SavePlan *p, int file) {
  char name[64];
  file_name(p, file, name);
  char *path = fs_join(p->tmp, name);
  StWriter *w = stw_begin(path);
  free(path);
  stw_metadata(w, "format", "pt"); /* transformers refuses a file without it */
  for (int i = 0; i < p->n_tensors; i++) {
    const SavedTensor *t = &p->tensor[i];
    if (t->file == file) stw_add(w, t->name, p->o->dtype, t->ndim, t->dim);
  }
  return w;
}

/* Collective. Each step is agreed upon, so that all ranks stop at the same place. */
static int write_file(SavePlan *p, int file, Error *err) {
  Comm *all = p->m->grid->all;
  StWriter *w = layout_file(p, file);
  int rc = p->m->grid->rank == 0 ? stw_create(w, err) : 0;
  rc = comm_agree(all, rc, err);
  if (!rc) rc = comm_agree(all, stw_open(w, err), err);
  if (!rc) rc = write_pieces(p, file, w, err);
  Error close_err = {""};
  if (stw_close(w, &close_err) && !rc) rc = error_set(err, "%s", close_err.msg);
  return comm_agree(all, rc, err);
}

/* ---- the small files (rank 0) ---- */

/* 15 digits give the decimals that people write (0.1, not 0.10000000000000001); where a number
 * needs more to read back equal, all get 17. */
static int write_json(const char *dir, const char *name, const json_t *j, Error *err) {
  char *text = json_dumps(j, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
  json_t *back = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
  if (!json_equal(j, back)) {
    free(text);
    text = json_dumps(j, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
  }
  json_decref(back);
  if (!text) die("cannot write %s as JSON", name);
  char *with_newline = mem_printf("%s\n", text);
  char *path = fs_join(dir, name);
  int rc = fs_write_atomic(path, with_newline, strlen(with_newline), err);
  free(path);
  free(with_newline);
  free(text);
  return rc;
}

static int write_index(const SavePlan *p, Error *err) {
  int64_t numel = 0;
  json_t *map = json_object();
  for (int i = 0; i < p->n_tensors; i++) {
    char name[64];
    file_name(p, p->tensor[i].file, name);
    json_object_set_new(map, p->tensor[i].name, json_string(name));
    numel += p->tensor[i].numel;
  }
  json_int_t bytes = (json_int_t)numel * (json_int_t)dtype_size(p->o->dtype);
  json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", bytes, "weight_map", map);
  int rc = write_json(p->tmp, "model.safetensors.index.json", index, err);
  json_decref(index);
  return rc;
}

/* tokenizer_dir: a folder, or a SentencePiece .model file alone. */
static int copy_tokenizer(const SavePlan *p, Error *err) {
  static const char *const names[] = {
      "tokenizer.model",         "tokenizer.json",      "tokenizer_config.json",
      "special_tokens_map.json", "vocab.json",          "merges.txt",
      "added_tokens.json",       "chat_template.jinja", "chat_template.json"};
  const char *from = p->o->tokenizer_dir;
  if (!from) return 0;
  if (!fs_exists(from)) return error_set(err, "%s: no such tokenizer", from);
  bool folder = fs_is_dir(from);
  int rc = 0;
  for (size_t i = 0; i < (folder ? sizeof names / sizeof names[0] : 1) && !rc; i++) {
    char *source = folder ? fs_join(from, names[i]) : mem_strdup(from);
    char *target = fs_join(p->tmp, names[i]);
    if (fs_exists(source)) rc = fs_copy(source, target, err);
    free(source);
    free(target);
  }
  return rc;
}

static int write_chat_template(const SavePlan *p, Error *err) {
  const char *text = p->o->chat_template;
  if (!text) return 0;
  char *path = fs_join(p->tmp, "chat_template.jinja");
  int rc = fs_write_atomic(path, text, strlen(text), err);
  free(path);
  return rc;
}

static int write_small_files(const SavePlan *p, Error *err) {
  if (p->n_files > 1 && write_index(p, err)) return -1;
  json_t *config = config_to_json(p->m, p->o->dtype, p->o->extra);
  int rc = write_json(p->tmp, "config.json", config, err);
  json_decref(config);
  if (rc) return -1;
  json_t *generation = generation_to_json(p->m);
  rc = write_json(p->tmp, "generation_config.json", generation, err);
  json_decref(generation);
  return rc || copy_tokenizer(p, err) ? -1 : write_chat_template(p, err);
}

/* ---- all of it ---- */

/* Rank 0 makes the folder; the others are told its name. */
static int begin_folder(SavePlan *p, const char *dir, Error *err) {
  Grid *g = p->m->grid;
  uint64_t len = 0;
  if (g->rank == 0) p->tmp = fs_dir_begin(dir, err);
  if (comm_agree(g->all, g->rank == 0 && !p->tmp ? -1 : 0, err)) return -1;
  if (p->tmp) len = strlen(p->tmp) + 1;
  comm_broadcast(g->all, &len, sizeof len, 0);
  if (g->rank != 0) p->tmp = mem_alloc(len, 1);
  comm_broadcast(g->all, p->tmp, len, 0);
  return 0;
}

int model_save(Model *m, const char *dir, const SaveOptions *o, Error *err) {
  require(o->kind == STATE_MASTER || (o->kind == STATE_EMA && zeropp_has_ema(m->zero)));
  require(o->dtype == DT_F32 || o->dtype == DT_BF16 || o->dtype == DT_F16);
  SavePlan p = {.m = m, .o = o};
  if (begin_folder(&p, dir, err)) return -1;
  plan_tensors(&p);
  plan_files(&p);
  int rc = 0;
  for (int i = 0; i < p.n_files && !rc; i++) rc = write_file(&p, i, err);
  if (!rc && m->grid->rank == 0) {
    rc = write_small_files(&p, err);
    if (!rc) rc = fs_dir_commit(p.tmp, dir, err);
  }
  rc = comm_agree(m->grid->all, rc, err);
  if (rc) {
    if (m->grid->rank == 0) fs_dir_abandon(p.tmp);
    comm_barrier(m->grid->all); /* nothing is left when any rank returns */
    error_prefix(err, "cannot save %s", dir);
  }
  free(p.tmp);
  free(p.tensor);
  free(p.tensor_of);
  return rc;
}
