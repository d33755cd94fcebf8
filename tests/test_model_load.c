/* What model_load takes and refuses: missing, misshapen and unknown tensors, heads under other
 * names; and that a rank reads its own pieces only. ranks: 1 2 3 */
#include "tests/model_files_test.h"

/* How rewrite() changes the tensors of a folder; names may be NULL. */
typedef struct Change {
  const char *drop, *reshape, *retype;
  const char *rename, *to;
  bool flat;              /* the renamed one as one dimension */
  const char *strip;      /* a prefix that all names lose */
  const char *add, *like; /* a copy of `like`, scaled */
  float scale;
} Change;

static bool is(const char *a, const char *b) { return a && b && !strcmp(a, b); }

static float *values_of(const StSet *set, const char *name) {
  const StFile *f;
  const StEntry *e = stset_find(set, name, &f);
  if (!e) die("no tensor %s", name);
  float *x = mem_alloc((size_t)e->numel, sizeof *x);
  Error err = {""};
  if (st_read_f32(f, e, 0, e->numel, x, &err)) die("%s", err.msg);
  return x;
}

static void add_changed(StWriter *w, const StEntry *e, const Change *c) {
  int64_t dim[2] = {e->dim[0], e->ndim > 1 ? e->dim[1] : 1};
  int ndim = e->ndim;
  const char *name = is(c->rename, e->name) ? c->to : e->name;
  if (c->strip && !strncmp(name, c->strip, strlen(c->strip))) name += strlen(c->strip);
  if (is(c->reshape, e->name)) {
    dim[0] = e->dim[1];
    dim[1] = e->dim[0];
  }
  if (is(c->rename, e->name) && c->flat) {
    dim[0] = e->numel;
    ndim = 1;
  }
  stw_add(w, name, is(c->retype, e->name) ? DT_I32 : DT_F32, ndim, dim);
}

static void write_changed(StWriter *w, const StSet *set, const Change *c) {
  Error err = {""};
  int index = 0;
  for (int i = 0; i < stset_count(set); i++) {
    const StEntry *e = stset_entry(set, i, NULL);
    if (is(c->drop, e->name)) continue;
    if (is(c->retype, e->name)) {
      index++;
      continue;
    }
    float *x = values_of(set, e->name);
    if (stw_write_f32(w, index++, 0, e->numel, x, &err)) die("%s", err.msg);
    free(x);
  }
  if (!c->add) return;
  const StEntry *e = stset_find(set, c->like, NULL);
  float *x = values_of(set, c->like);
  for (int64_t i = 0; i < e->numel; i++) x[i] *= c->scale;
  if (stw_write_f32(w, index, 0, e->numel, x, &err)) die("%s", err.msg);
  free(x);
}

/* Rank 0 rewrites DIR/model.safetensors with the change. */
static void rewrite(Bench *b, const char *dir, Change c) {
  Error err = {""};
  if (b->grid->rank == 0) {
    char *path = fs_join(dir, "model.safetensors"), *other = fs_join(dir, "changed");
    StSet *set = stset_open(dir, &err);
    if (!set) die("%s", err.msg);
    StWriter *w = stw_begin(other);
    stw_metadata(w, "format", "pt");
    for (int i = 0; i < stset_count(set); i++)
      if (!is(c.drop, stset_entry(set, i, NULL)->name))
        add_changed(w, stset_entry(set, i, NULL), &c);
    if (c.add) {
      const StEntry *e = stset_find(set, c.like, NULL);
      stw_add(w, c.add, DT_F32, e->ndim, e->dim);
    }
    if (stw_create(w, &err) || stw_open(w, &err)) die("%s", err.msg);
    write_changed(w, set, &c);
    if (stw_close(w, &err)) die("%s", err.msg);
    stset_close(set);
    if (rename(other, path)) die("cannot rename %s", other);
    free(path);
    free(other);
  }
  comm_barrier(b->grid->all);
}

typedef struct LoadCase {
  HeadKind saved, loaded;
  bool tied, biases, init_head;
  Change change;
  const char *says; /* in the message; NULL: it loads */
} LoadCase;

static void check_load(Bench *b, const LoadCase *k, int number) {
  ModelConfig c = tiny_config(k->tied, k->biases);
  ModelOptions o = tiny_options(k->saved);
  Model *m = tiny_model(b, b->grid, &c, &o);
  const char *dir = place("cases");
  save(m, dir, &as_f32);
  rewrite(b, dir, k->change);
  o = tiny_options(k->loaded);
  o.init_head = k->init_head;
  Error err = {""};
  Model *back = model_load(b->device, b->grid, b->arena, dir, &o, &err);
  if (k->says && back) fail_msg("case %d loads; expected \"%s\"", number, k->says);
  if (!k->says && !back) fail_msg("case %d: %s", number, err.msg);
  if (k->says && !strstr(err.msg, k->says))
    fail_msg("case %d: \"%s\" does not say \"%s\"", number, err.msg, k->says);
  if (back && k->saved == k->loaded) assert_same_weights(m, back, DT_F32);
  model_free(back);
  model_free(m);
}

#define DOWN "model.layers.1.mlp.down_proj.weight"
#define EMBEDDING "model.embed_tokens.weight"
#define NORM "model.norm.weight"

static void odd_checkpoints(void **state) {
  (void)state;
  static const LoadCase cases[] = {
      {.change = {.drop = DOWN}, .says = DOWN " is missing"},
      {.change = {.reshape = DOWN}, .says = DOWN " has shape [22, 15]; config.json gives [15, 22]"},
      {.change = {.retype = DOWN}, .says = DOWN " is I32"},
      {.change = {.add = "model.extra", .like = NORM, .scale = 1}, .says = "model.extra"},
      {.change = {.drop = "lm_head.weight"}, .says = "lm_head.weight is missing"},
      {.biases = false,
       .change = {.add = "model.layers.0.self_attn.q_proj.bias", .like = NORM},
       .says = "q_proj.bias"},
      {.change = {.add = "model.layers.0.self_attn.rotary_emb.inv_freq", .like = NORM}},
      {.tied = true, .change = {.add = "lm_head.weight", .like = EMBEDDING, .scale = 1}},
      {.tied = true,
       .change = {.add = "lm_head.weight", .like = EMBEDDING, .scale = 1.5f},
       .says = "differs"},
      {.change = {.add = "v_head.summary.weight", .like = NORM}}, /* an actor with a value head */
      /* Heads that are there under other names, and one that is not. */
      {.saved = HEAD_SCALAR, .loaded = HEAD_SCALAR, .biases = true},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.rename = "score.weight", .to = "value_head.weight", .flat = true}},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.rename = "score.weight", .to = "v_head.summary.weight"}},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.rename = "score.weight", .to = "reward_head.weight"}},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .biases = true,
       .change = {.rename = "score.bias", .to = "classifier.bias"}, /* not of the same head */
       .says = "classifier.bias"},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.rename = "score.weight", .to = "classifier.weight", .flat = true}},
      {.change = {.strip = "model."}}, /* a trunk published without its prefix */
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.strip = "model.", .drop = DOWN},
       .says = "layers.1.mlp.down_proj.weight is missing"},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.rename = "score.weight", .to = "my_head.weight"},
       .says = "no scalar head"},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .init_head = true, /* a reward model that lost its head is broken, not new */
       .change = {.drop = "score.weight"},
       .says = "score.weight"},
      {.saved = HEAD_SCALAR,
       .loaded = HEAD_SCALAR,
       .change = {.add = "v_head.weight", .like = "score.weight"},
       .says = "two scalar heads"},
      {.saved = HEAD_SCALAR, .loaded = HEAD_LM, .says = "no language-model head"},
      {.saved = HEAD_LM, .loaded = HEAD_SCALAR, .says = "init_head"},
      {.saved = HEAD_LM, .loaded = HEAD_SCALAR, .init_head = true},
      {.saved = HEAD_LM, .loaded = HEAD_SCALAR, .tied = true, .init_head = true},
  };
  Bench b = bench_open();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_load(&b, &cases[i], (int)i);
  Error err = {""};
  ModelOptions o = tiny_options(HEAD_LM);
  assert_null(model_load(b.device, b.grid, b.arena, place("nowhere"), &o, &err));
  assert_non_null(strstr(err.msg, "nowhere"));
  bench_close(&b);
}

/* A frozen model's load takes this rank's pieces and room for one unit in transit. */
static void no_rank_holds_all(void **state) {
  (void)state;
  Bench b = bench_open();
  ModelConfig c = tiny_config(false, false);
  c.n_layers = 24;
  c.vocab_size = 8;
  c.n_eos = 0;
  ModelOptions o = tiny_options(HEAD_LM);
  o.trainable = false;
  Model *m = tiny_model(&b, b.grid, &c, &o);
  save(m, place("pieces"), &as_f32);
  model_free(m);
  size_t before = device_bytes(b.device);
  device_reset_peak(b.device);
  Error err = {""};
  m = model_load(b.device, b.grid, b.arena, place("pieces"), &o, &err);
  assert_non_null(m);
  double peak = (double)(device_peak_bytes(b.device) - before);
  double whole = 4.0 * (double)model_config_params(&c, HEAD_LM);
  /* Odd sizes: pieces differ by a row, and each unit is rounded up a little. */
  double share = 1.1 * whole / b.grid->world, unit = b.grid->world > 1 ? 1.1 * whole / 24 : 0;
  if (peak > share + unit) fail_msg("peak %.0f of %.0f bytes", peak, whole);
  model_free(m);
  bench_close(&b);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(odd_checkpoints),
    cmocka_unit_test(no_rank_holds_all),
};
TEST_MAIN(tests)
