/* Hugging Face folders out and in: what is saved loads again with the same bits, on any number of
 * ranks; failures leave nothing behind.
 * ranks: 1 2 3 */
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/model_test.h"

static const int lengths[] = {9, 3, 17};

/* A name below this program's folder; in rotation, so that one call may hold several. */
static const char *place(const char *name) {
  static char path[4][512];
  static int turn;
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/files-%s", test_tmp(), name);
  return p;
}

static const SaveOptions as_f32 = {.dtype = DT_F32, .kind = STATE_MASTER};

static void save(Model *m, const char *dir, const SaveOptions *o) {
  Error err = {""};
  if (model_save(m, dir, o, &err)) fail_msg("%s", err.msg);
}

static Model *load(Bench *b, const char *dir, HeadKind head) {
  Error err = {""};
  ModelOptions o = tiny_options(head);
  Model *m = model_load(b->device, b->grid, b->arena, dir, &o, &err);
  if (!m) fail_msg("%s", err.msg);
  return m;
}

static bool exists_in(const char *dir, const char *name) {
  char *path = fs_join(dir, name);
  bool there = fs_exists(path);
  free(path);
  return there;
}

/* Same grid, same table: shards are the same ranges. */
static void assert_same_weights(Model *a, Model *b, DType through) {
  assert_int_equal(zeropp_n_params(model_zero(a)), zeropp_n_params(model_zero(b)));
  for (int p = 0; p < zeropp_n_params(model_zero(a)); p++) {
    int64_t start, count, start_b, count_b;
    const float *x = zeropp_shard(model_zero(a), STATE_MASTER, p, &start, &count);
    const float *y = zeropp_shard(model_zero(b), STATE_MASTER, p, &start_b, &count_b);
    assert_true(start == start_b && count == count_b);
    for (int64_t i = 0; i < count; i++) {
      float rounded = 0;
      uint64_t raw = 0;
      convert_from_f32(&x[i], &raw, through, 1);
      convert_to_f32(&raw, through, &rounded, 1);
      assert_true(y[i] == rounded);
    }
  }
}

static void assert_same_config(const ModelConfig *a, const ModelConfig *b) {
  assert_true(a->vocab_size == b->vocab_size && a->hidden == b->hidden && a->ffn == b->ffn);
  assert_true(a->n_layers == b->n_layers && a->n_heads == b->n_heads);
  assert_true(a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim);
  assert_true(a->norm_eps == b->norm_eps && a->init_std == b->init_std);
  assert_true(a->tied_head == b->tied_head && a->qkv_bias == b->qkv_bias);
  assert_true(a->o_bias == b->o_bias && a->mlp_bias == b->mlp_bias);
  assert_true(a->rope == b->rope && a->rope_theta == b->rope_theta);
  assert_true(a->rope_factor == b->rope_factor && a->rope_low_freq == b->rope_low_freq);
  assert_true(a->rope_high_freq == b->rope_high_freq);
  assert_true(a->rope_original_positions == b->rope_original_positions);
  assert_true(a->max_positions == b->max_positions && a->bos_id == b->bos_id);
  assert_true(a->pad_id == b->pad_id && a->n_eos == b->n_eos && a->eos_ids[1] == b->eos_ids[1]);
}

static void round_trip(void **state) {
  (void)state;
  Bench b = bench_open();
  for (int kind = 0; kind < 4; kind++) {
    HeadKind head = kind < 2 ? HEAD_LM : HEAD_SCALAR;
    ModelConfig c = tiny_config(kind % 2, !(kind % 2));
    if (kind == 1) {
      c.rope = ROPE_LLAMA3;
      c.rope_factor = 8;
      c.rope_low_freq = 1;
      c.rope_high_freq = 4;
      c.rope_original_positions = 16;
      c.n_eos = 2;
      c.eos_ids[1] = 5;
    } else if (kind == 2) {
      c.rope = ROPE_LINEAR;
      c.rope_factor = 2.5;
    }
    ModelOptions o = tiny_options(head);
    Model *m = tiny_model(&b, b.grid, &c, &o);
    const char *dir = place("round");
    save(m, dir, &as_f32);
    Model *back = load(&b, dir, head);
    assert_same_weights(m, back, DT_F32);
    assert_same_config(&c, model_config(back));
    TestBatch batch = test_batch(3, lengths, c.vocab_size);
    assert_true(eval_batch(m, &batch, 0) == eval_batch(back, &batch, 0));
    Error err = {""};
    StSet *set = stset_open(dir, &err);
    assert_non_null(set);
    /* A tied head is written once: as the embedding. */
    assert_true((stset_find(set, "lm_head.weight", NULL) != NULL) == (kind == 0));
    const StEntry *score = stset_find(set, "score.weight", NULL);
    assert_true((score != NULL) == (head == HEAD_SCALAR));
    if (score) assert_true(score->ndim == 2 && score->dim[0] == 1 && score->dim[1] == c.hidden);
    stset_close(set);
    model_free(back);
    model_free(m);
  }
  bench_close(&b);
}

static void narrow_types(void **state) {
  (void)state;
  Bench b = bench_open();
  ModelConfig c = tiny_config(false, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&b, b.grid, &c, &o);
  const DType types[] = {DT_BF16, DT_F16};
  for (int i = 0; i < 2; i++) {
    SaveOptions s = {.dtype = types[i], .kind = STATE_MASTER};
    save(m, place("narrow"), &s);
    Model *back = load(&b, place("narrow"), HEAD_LM);
    assert_same_weights(m, back, types[i]);
    assert_true(model_config(back)->dtype == types[i]);
    model_free(back);
  }
  /* One weight that float16 has no number for, on whichever rank owns it. */
  int64_t start, count;
  float *w = zeropp_shard(model_zero(m), STATE_MASTER, 2, &start, &count);
  for (int64_t k = 0; k < count; k++)
    if (start + k == 200) w[k] = 1e6f;
  Error err = {""};
  SaveOptions s = {.dtype = DT_F16, .kind = STATE_MASTER};
  assert_int_equal(model_save(m, place("overflow"), &s, &err), -1);
  assert_non_null(strstr(err.msg, "float16"));
  assert_false(fs_exists(place("overflow")));
  model_free(m);
  bench_close(&b);
}

static void sharded_and_averaged(void **state) {
  (void)state;
  Bench b = bench_open();
  ModelConfig c = tiny_config(true, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&b, b.grid, &c, &o);
  zeropp_ema_enable(model_zero(m)); /* a copy of the masters; then the masters move on */
  Model *old = tiny_model(&b, b.grid, &c, &o);
  for (int p = 0; p < zeropp_n_params(model_zero(m)); p++) {
    int64_t start, count;
    float *w = zeropp_shard(model_zero(m), STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++) w[i] += 1;
  }
  zeropp_weights_written(model_zero(m));
  SaveOptions s = {.dtype = DT_F32, .kind = STATE_EMA, .max_shard_bytes = 4000};
  save(m, place("shards"), &s);
  assert_true(exists_in(place("shards"), "model.safetensors.index.json"));
  assert_false(exists_in(place("shards"), "model.safetensors"));
  Model *back = load(&b, place("shards"), HEAD_LM);
  assert_same_weights(old, back, DT_F32);
  model_free(m);
  model_free(old);
  model_free(back);
  bench_close(&b);
}

static void put_file(Bench *b, const char *dir, const char *name, const char *text) {
  Error err = {""};
  char *path = fs_join(dir, name);
  if (b->grid->rank == 0 && fs_write_atomic(path, text, strlen(text), &err)) die("%s", err.msg);
  free(path);
  comm_barrier(b->grid->all);
}

static void rest_of_the_folder(void **state) {
  (void)state;
  Bench b = bench_open();
  ModelConfig c = tiny_config(false, false);
  ModelOptions o = tiny_options(HEAD_SCALAR);
  Model *m = tiny_model(&b, b.grid, &c, &o);
  save(m, place("first"), &as_f32);
  Error err = {""};
  char *path = fs_join(place("first"), "config.json");
  json_t *config = json_read(path, &err), *extra = json_pack("{s:f}", "rlhf_score_mean", 0.1);
  json_object_set_new(config, "some_key", json_real(0.1));
  char *text = json_dumps(config, 0);
  put_file(&b, place("first"), "config.json", text);
  put_file(&b, place("first"), "generation_config.json", "{\"eos_token_id\":[2,7],\"x\":1}");
  put_file(&b, place("first"), "tokenizer.model", "not looked into");
  free(text);
  json_decref(config);
  free(path);

  Model *back = load(&b, place("first"), HEAD_SCALAR);
  SaveOptions s = as_f32;
  s.tokenizer_dir = place("first");
  s.extra = extra;
  save(back, place("second"), &s);
  path = fs_join(place("second"), "config.json");
  config = json_read(path, &err);
  assert_non_null(config);
  assert_true(json_real_value(json_object_get(config, "some_key")) == 0.1);
  assert_true(json_real_value(json_object_get(config, "rlhf_score_mean")) == 0.1);
  assert_int_equal(json_integer_value(json_object_get(config, "num_labels")), 1);
  ModelConfig read;
  assert_int_equal(model_config_read(place("second"), &read, &err), 0);
  assert_true(read.n_eos == 2 && read.eos_ids[1] == 7 && read.head == HEAD_SCALAR);
  assert_true(exists_in(place("second"), "tokenizer.model"));
  json_decref(config);
  json_decref(extra);
  free(path);
  model_free(back);
  model_free(m);
  bench_close(&b);
}

/* ---- failing saves ---- */

static void assert_nothing_at(const char *dir) {
  char *tmp = mem_printf("%s.tmp", dir);
  assert_false(fs_exists(dir));
  assert_false(fs_exists(tmp));
  free(tmp);
}

static void failed_save_leaves_nothing(void **state) {
  (void)state;
  Bench b = bench_open();
  ModelConfig c = tiny_config(false, false);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&b, b.grid, &c, &o);
  Error err = {""};
  SaveOptions s = as_f32;
  s.tokenizer_dir = place("no-such-tokenizer");
  assert_int_equal(model_save(m, place("failed"), &s, &err), -1);
  assert_non_null(strstr(err.msg, "no-such-tokenizer"));
  assert_nothing_at(place("failed"));

  /* A file that may not grow beyond 4 KiB stands for a full disk. */
  struct rlimit before, tight;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  tight = before;
  tight.rlim_cur = 4096;
  signal(SIGXFSZ, SIG_IGN);
  comm_barrier(b.grid->all);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
  int rc = model_save(m, place("failed"), &as_f32, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, SIG_DFL);
  assert_int_equal(rc, -1);
  comm_barrier(b.grid->all);
  assert_nothing_at(place("failed"));

  /* What was there before a failing save is still whole; a stale .tmp of a killed one is no bar. */
  save(m, place("kept"), &as_f32);
  char *tmp = mem_printf("%s.tmp", place("kept"));
  if (b.grid->rank == 0) assert_int_equal(fs_make_dirs(tmp, &err), 0);
  comm_barrier(b.grid->all);
  assert_int_equal(model_save(m, place("kept"), &s, &err), -1);
  Model *back = load(&b, place("kept"), HEAD_LM);
  assert_same_weights(m, back, DT_F32);
  save(m, place("kept"), &as_f32);
  assert_false(fs_exists(tmp));
  free(tmp);
  model_free(back);
  model_free(m);
  bench_close(&b);
}

/* ---- loads that are refused, and odd ones that are not ---- */

/* How rewrite() changes the tensors of a folder; names may be NULL. */
typedef struct Change {
  const char *drop, *reshape, *retype;
  const char *rename, *to;
  bool flat;              /* the renamed one as one dimension */
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
    cmocka_unit_test(round_trip),
    cmocka_unit_test(narrow_types),
    cmocka_unit_test(sharded_and_averaged),
    cmocka_unit_test(rest_of_the_folder),
    cmocka_unit_test(failed_save_leaves_nothing),
    cmocka_unit_test(odd_checkpoints),
    cmocka_unit_test(no_rank_holds_all),
};
TEST_MAIN(tests)
