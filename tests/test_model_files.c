/* Hugging Face folders out and in: what is saved loads again with the same bits, on any number of
 * ranks; failures leave nothing behind. Odd checkpoints: test_model_load.c.
 * ranks: 1 2 3 */
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/model_files_test.h"

static const int lengths[] = {9, 3, 17};

static bool exists_in(const char *dir, const char *name) {
  char *path = fs_join(dir, name);
  bool there = fs_exists(path);
  free(path);
  return there;
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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(round_trip),
    cmocka_unit_test(narrow_types),
    cmocka_unit_test(sharded_and_averaged),
    cmocka_unit_test(rest_of_the_folder),
    cmocka_unit_test(failed_save_leaves_nothing),
};
TEST_MAIN(tests)
