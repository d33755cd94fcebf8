/* The tokenizer's files: what the JSON beside the model changes, and damaged or foreign files,
 * which must give one clear error, nothing on stderr, and no crash. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "core/fs.h"
#include "core/rng.h"
#include "generation/generation.h"
#include "tests/test.h"

/* ---- folders to load from ---- */

static void put_file(const char *dir, const char *name, const void *data, size_t len) {
  Error err = {""};
  char *path = fs_join(dir, name);
  if (fs_make_dirs(dir, &err) || fs_write_atomic(path, data, len, &err)) fail_msg("%s", err.msg);
  free(path);
}

/* A folder with stories260K's model and the given JSON files (NULL: absent). */
static char *folder(const char *config, const char *map, const char *added) {
  Error err = {""};
  char *dir = fs_join(test_tmp(), "tokenizer");
  assert_int_equal(fs_remove_tree(dir, &err), 0);
  size_t len;
  char *model = fs_read(test_path("data/stories260K/tokenizer.model"), &len, &err);
  if (!model) fail_msg("%s", err.msg);
  put_file(dir, "tokenizer.model", model, len);
  free(model);
  if (config) put_file(dir, "tokenizer_config.json", config, strlen(config));
  if (map) put_file(dir, "special_tokens_map.json", map, strlen(map));
  if (added) put_file(dir, "added_tokens.json", added, strlen(added));
  return dir;
}

static Tokenizer *load(const char *config, const char *map, const char *added) {
  Error err = {""};
  char *dir = folder(config, map, added);
  Tokenizer *t = tokenizer_load(dir, &err);
  if (!t) fail_msg("%s", err.msg);
  free(dir);
  return t;
}

/* One line that names the file and holds `what`. */
static void expect_error(const Error *err, const char *path, const char *what) {
  if (strncmp(err->msg, path, strlen(path)) != 0 || strchr(err->msg, '\n') ||
      !strstr(err->msg, what))
    fail_msg("error is \"%s\"; expected %s: ... %s", err->msg, path, what);
}

static void refuse(const char *config, const char *map, const char *added, const char *what) {
  Error err = {""};
  char *dir = folder(config, map, added);
  assert_null(tokenizer_load(dir, &err));
  expect_error(&err, dir, what);
  free(dir);
}

static void expect_ids(const Tokenizer *t, const char *s, int flags, int n, const int32_t *want) {
  Error err = {""};
  TokenList ids = {0};
  if (tokenizer_encode(t, s, strlen(s), flags, &ids, &err)) fail_msg("%s", err.msg);
  assert_int_equal(ids.n, n);
  assert_memory_equal(ids.v, want, (size_t)n * sizeof *want);
  token_list_free(&ids);
}
#define IDS(...) \
  (int)(sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)), (int32_t[]) { __VA_ARGS__ }

static void expect_decode(const Tokenizer *t, const char *want, int n, const int32_t *ids) {
  Error err = {""};
  char *s = tokenizer_decode(t, ids, n, NULL, &err);
  if (!s) fail_msg("%s", err.msg);
  assert_string_equal(s, want);
  free(s);
}

/* ---- configuration (in stories260K: "a" is 413 or so; ids are looked up, not assumed) ---- */

static int32_t id_of(const Tokenizer *t, const char *s, int flags) {
  Error err = {""};
  TokenList ids = {0};
  assert_int_equal(tokenizer_encode(t, s, strlen(s), flags, &ids, &err), 0);
  assert_int_equal(ids.n, 1);
  int32_t id = ids.v[0];
  token_list_free(&ids);
  return id;
}

static void test_bos_and_eos(void **state) {
  (void)state;
  Tokenizer *t = load(NULL, NULL, NULL);
  assert_int_equal(tokenizer_bos(t), 1);
  assert_int_equal(tokenizer_eos(t), 2);
  assert_true(tokenizer_adds_bos(t));
  tokenizer_free(t);
  t = load(
      "{\"add_bos_token\": false, \"bos_token\": {\"content\": \"</s>\"}, \"eos_token\": \"<s>\"}",
      NULL, NULL);
  assert_int_equal(tokenizer_bos(t), 2);
  assert_int_equal(tokenizer_eos(t), 1);
  assert_false(tokenizer_adds_bos(t));
  tokenizer_free(t);
  t = load("{\"bos_token\": null}", "{\"bos_token\": \"<s>\", \"eos_token\": \"<s>\"}", NULL);
  assert_int_equal(tokenizer_bos(t), -1); /* the newer file decides */
  assert_int_equal(tokenizer_eos(t), 1);
  assert_false(tokenizer_adds_bos(t));
  Error err = {""};
  TokenList ids = {0};
  assert_int_equal(tokenizer_encode(t, "a", 1, TOK_BOS, &ids, &err), -1);
  assert_non_null(strstr(err.msg, "BOS"));
  assert_int_equal(ids.n, 0);
  tokenizer_free(t);
}

static void test_added_tokens(void **state) {
  (void)state;
  Tokenizer *t = load(
      "{\"added_tokens_decoder\": {\"512\": {\"content\": \"<|x|>\", \"special\": true},"
      "\"513\": {\"content\": \"<|x|>y\", \"special\": true},"
      "\"514\": {\"content\": \"zz top\", \"special\": false},"
      "\"515\": {\"content\": \"[B]\", \"special\": true, \"lstrip\": true, \"rstrip\": true},"
      "\"520\": {\"content\": \"[C]\", \"special\": true}}}",
      NULL, NULL);
  assert_int_equal(tokenizer_vocab_size(t), 521);
  assert_int_equal(tokenizer_special(t, "<|x|>y"), 513);
  int32_t a = id_of(t, "a", 0);
  expect_ids(t, "<|x|>", TOK_SPECIAL, IDS(512));
  expect_ids(t, "<|x|>y", TOK_SPECIAL, IDS(513)); /* the longest wins */
  expect_ids(t, "a<|x|>a", TOK_SPECIAL, IDS(a, 512, a));
  expect_ids(t, "a \n[B] \ta", TOK_SPECIAL, IDS(a, 515, a));
  expect_ids(t, "azz topa", 0, IDS(a, 514, a)); /* not special: part of the vocabulary */
  expect_decode(t, "azz top a", IDS(a, 512, 514, a, 513, 515, 520));
  Error err = {""};
  static const int32_t hole[] = {517};
  assert_null(tokenizer_decode(t, hole, 1, NULL, &err));
  TokenList ids = {0};
  assert_int_equal(tokenizer_encode(t, "<|x|>", 5, 0, &ids, &err), 0);
  for (int i = 0; i < ids.n; i++) assert_true(ids.v[i] < 512);
  token_list_free(&ids);
  tokenizer_free(t);
}

/* A template spells special tokens; what a user wrote (1 in the mask) cannot, nor finish one that
 * the template began. */
static void test_templates(void **state) {
  (void)state;
  Tokenizer *t = load(NULL, NULL, NULL);
  static const struct {
    const char *text, *content;
    int specials;
  } cases[] = {{"</s>a</s>", "\0\0\0\0\1\0\0\0\0", 2},
               {"</s>a</s>", "\0\0\0\0\1\1\1\1\1", 1},
               {"</s>a</s>", "\0\0\0\0\1\1\0\0\0", 1},
               {"</s>a</s>", "\0\0\0\1\1\0\0\0\0", 1},
               {"</s>a</s>", "\1\1\1\1\1\1\1\1\1", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Error err = {""};
    TokenList ids = {0};
    int specials = 0;
    assert_int_equal(
        tokenizer_encode_template(t, cases[i].text, cases[i].content, 9, TOK_BOS, &ids, &err), 0);
    assert_int_equal(ids.v[0], 1);
    for (int k = 0; k < ids.n; k++) specials += ids.v[k] == 2;
    assert_int_equal(specials, cases[i].specials);
    token_list_free(&ids);
  }
  tokenizer_free(t);
}

static void test_older_files(void **state) {
  (void)state;
  Tokenizer *t = load(NULL,
                      "{\"eos_token\": {\"content\": \"<end>\"}, \"pad_token\": \"not there\", "
                      "\"additional_special_tokens\": [\"<more>\"]}",
                      "{\"<end>\": 512, \"<more>\": 513, \"word\": 514}");
  assert_int_equal(tokenizer_eos(t), 512);
  int32_t a = id_of(t, "a", 0);
  expect_ids(t, "a<end><more>", TOK_SPECIAL, IDS(a, 512, 513));
  expect_ids(t, "wordword", 0, IDS(514, 514));
  tokenizer_free(t);
}

/* legacy (the default, as in transformers): every piece of text behind a special token starts with
 * a space of its own; otherwise only the whole text does. */
static void test_prefix_rules(void **state) {
  (void)state;
  Tokenizer *t = load("{\"legacy\": true}", NULL, NULL);
  int32_t spaced = id_of(t, "a", 0), bare = id_of(t, "a", TOK_CONTINUE);
  assert_true(spaced != bare);
  expect_ids(t, "a</s>a", TOK_SPECIAL, IDS(spaced, 2, spaced));
  expect_ids(t, "a</s>a", TOK_SPECIAL | TOK_CONTINUE, IDS(bare, 2, spaced));
  tokenizer_free(t);
  t = load("{\"legacy\": false}", NULL, NULL);
  expect_ids(t, "a</s>a", TOK_SPECIAL, IDS(spaced, 2, bare));
  expect_ids(t, "</s>a", TOK_SPECIAL, IDS(2, bare));
  tokenizer_free(t);
  t = load("{\"add_prefix_space\": false}", NULL, NULL);
  expect_ids(t, "a</s>a", TOK_SPECIAL, IDS(bare, 2, bare));
  tokenizer_free(t);
}

static void test_wrong_config(void **state) {
  (void)state;
  refuse("{", NULL, NULL, "tokenizer_config.json");
  refuse("[]", NULL, NULL, "expected an object");
  refuse("{\"tokenizer_class\": \"XLMRobertaTokenizer\"}", NULL, NULL, "XLMRobertaTokenizer");
  refuse("{\"tokenizer_class\": 3}", NULL, NULL, "tokenizer_class");
  refuse("{\"add_bos_token\": \"yes\"}", NULL, NULL, "add_bos_token");
  refuse("{\"add_bos_token\": true, \"bos_token\": null}", NULL, NULL, "no bos_token");
  refuse("{\"bos_token\": \"<nope>\"}", NULL, NULL, "\"<nope>\" is not in the vocabulary");
  refuse("{\"eos_token\": 5}", NULL, NULL, "eos_token");
  refuse("{\"added_tokens_decoder\": []}", NULL, NULL, "added_tokens_decoder");
  refuse("{\"added_tokens_decoder\": {\"x\": {\"content\": \"y\"}}}", NULL, NULL, "\"x\"");
  refuse("{\"added_tokens_decoder\": {\"600\": \"y\"}}", NULL, NULL, "\"600\"");
  refuse("{\"added_tokens_decoder\": {\"600\": {\"content\": \"\"}}}", NULL, NULL, "empty");
  refuse("{\"added_tokens_decoder\": {\"-1\": {\"content\": \"y\"}}}", NULL, NULL, "id -1");
  refuse("{\"added_tokens_decoder\": {\"99999999999\": {\"content\": \"y\"}}}", NULL, NULL,
         "id 99");
  refuse("{\"added_tokens_decoder\": {\"7\": {\"content\": \"</s>\"}}}", NULL, NULL,
         "id 7 here and 2");
  refuse("{\"additional_special_tokens\": [\"<nope>\"]}", NULL, NULL, "<nope>");
  refuse(NULL, "{\"additional_special_tokens\": {}}", NULL, "expected an array");
  refuse(NULL, NULL, "{\"<a>\": \"512\"}", "expected an id");
  refuse(NULL, NULL, "[1]", "expected an object");
}

/* ---- files that are no model ---- */

static void test_other_tokenizers(void **state) {
  (void)state;
  Error err = {""};
  char *dir = fs_join(test_tmp(), "other");
  assert_int_equal(fs_make_dirs(dir, &err), 0);
  assert_false(tokenizer_exists(dir));
  assert_null(tokenizer_load(dir, &err));
  expect_error(&err, dir, "expected tokenizer.model, tokenizer.json, or vocab.json");
  free(dir);
  assert_null(tokenizer_load("/nowhere/tokenizer.model", &err));
  expect_error(&err, "/nowhere/tokenizer.model", "No such file");
}

/* A model and its translation to tokenizer.json, which is of a kind that is not supported. */
static void test_model_and_json(void **state) {
  (void)state;
  Error err = {""};
  char *dir = folder(NULL, NULL, NULL);
  put_file(dir, "tokenizer.json", "{}", 2);
  Tokenizer *t = tokenizer_load(dir, &err);
  if (!t) fail_msg("%s", err.msg);
  assert_string_equal(tokenizer_kind(t), "SentencePiece");
  tokenizer_free(t);
  free(dir);
}

/* Loads a model from bytes. What loads must also encode and decode without harm. */
static bool loads(const char *data, size_t len) {
  Error err = {""};
  put_file(test_tmp(), "any.model", data, len);
  char *path = fs_join(test_tmp(), "any.model");
  Tokenizer *t = tokenizer_load(path, &err);
  if (t) {
    TokenList ids = {0};
    static const char text[] = "Once upon a time \xf0\x9f\xa6\x99 \xff\n<s>";
    if (tokenizer_encode(t, text, sizeof text, TOK_SPECIAL, &ids, &err) == 0)
      free(tokenizer_decode(t, ids.v, ids.n, NULL, &err));
    token_list_free(&ids);
    tokenizer_free(t);
  } else {
    expect_error(&err, path, ": ");
  }
  free(path);
  return t != NULL;
}

/* What the library says by itself: nothing may reach stderr between quiet_begin and quiet_end. */
typedef struct Quiet {
  char *log;
  int old;
} Quiet;

static Quiet quiet_begin(void) {
  Quiet q = {.log = fs_join(test_tmp(), "stderr")};
  int fd = open(q.log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  fflush(stderr);
  q.old = dup(STDERR_FILENO);
  dup2(fd, STDERR_FILENO);
  close(fd);
  return q;
}

static void quiet_end(Quiet q) {
  fflush(stderr);
  dup2(q.old, STDERR_FILENO);
  close(q.old);
  size_t len;
  char *words = fs_read(q.log, &len, NULL);
  assert_string_equal(words, "");
  free(words);
  free(q.log);
}

static void test_truncated(void **state) {
  (void)state;
  static const char *const models[] = {"data/stories260K/tokenizer.model",
                                       "data/tokenizers/mistral-v1/tokenizer.model"};
  const char *paths[] = {test_path(models[0]), test_path(models[1])};
  bool all_refused = true;
  Quiet q = quiet_begin();
  for (int m = 0; m < 2; m++) {
    Error err = {""};
    size_t len;
    char *data = fs_read(paths[m], &len, &err);
    size_t step = len / 300;
    for (size_t cut = 0; cut<len; cut += cut + 40> len || cut < 40 ? 1 : step)
      all_refused &= !loads(data, cut);
    free(data);
  }
  quiet_end(q);
  assert_true(all_refused);
}

static void test_damaged(void **state) {
  (void)state;
  Error err = {""};
  size_t len;
  char *data = fs_read(test_path("data/stories260K/tokenizer.model"), &len, &err);
  char *copy = mem_alloc(len, 1);
  int refused = 0, noise = 0;
  Quiet q = quiet_begin();
  for (uint64_t i = 0; i < 400; i++) {
    memcpy(copy, data, len);
    for (uint64_t k = 0; k <= i % 8; k++) {
      RngBlock r = rng_block(5, i, k);
      copy[r.v[0] % len] = (char)r.v[1];
    }
    refused += !loads(copy, len);
  }
  for (uint64_t i = 0; i < 100; i++) { /* not a model at all */
    for (size_t k = 0; k < 200; k++) copy[k] = (char)rng_block(6, i, k).v[0];
    noise += !loads(copy, 1 + i * 2 % 199);
  }
  quiet_end(q);
  assert_true(refused > 100);
  assert_int_equal(noise, 100);
  free(copy);
  free(data);
}

/* ---- models made here, field by field (sentencepiece_model.proto) ---- */

typedef struct Bytes {
  char v[4096];
  size_t n;
} Bytes;

static void put(Bytes *b, const void *p, size_t n) {
  memcpy(b->v + b->n, p, n);
  b->n += n;
}
static void put_bytes(Bytes *b, int field, const void *p, size_t n) { /* n < 16384 */
  char head[] = {(char)(field << 3 | 2), (char)(n & 127) | (char)128, (char)(n >> 7)};
  put(b, head, 3);
  put(b, p, n);
}
static void put_int(Bytes *b, int field, int v) {
  char head[] = {(char)(field << 3), (char)v};
  put(b, head, 2);
}
static void put_piece(Bytes *model, const char *text, int kind) {
  Bytes piece = {.n = 0};
  put_bytes(&piece, 1, text, strlen(text));
  put_int(&piece, 3, kind);
  put_bytes(model, 1, piece.v, piece.n);
}

/* <unk> <s> </s> U+2581 a b, unigram; the normalizer may carry a table. */
static Bytes tiny_model(const void *charsmap, size_t len) {
  Bytes model = {.n = 0}, normalizer = {.n = 0};
  put_piece(&model, "<unk>", 2);
  put_piece(&model, "<s>", 3);
  put_piece(&model, "</s>", 3);
  put_piece(&model, "\xe2\x96\x81", 1);
  put_piece(&model, "a", 1);
  put_piece(&model, "b", 1);
  put_bytes(&model, 2, "\x18\x01", 2); /* trainer_spec {model_type: UNIGRAM} */
  put_int(&normalizer, 4, 0);          /* remove_extra_whitespaces: false */
  if (len) put_bytes(&normalizer, 2, charsmap, len);
  put_bytes(&model, 3, normalizer.v, normalizer.n);
  return model;
}

static void test_no_byte_tokens(void **state) {
  (void)state;
  Error err = {""};
  Bytes model = tiny_model(NULL, 0);
  put_file(test_tmp(), "tiny.model", model.v, model.n);
  char *path = fs_join(test_tmp(), "tiny.model");
  Tokenizer *t = tokenizer_load(path, &err);
  if (!t) fail_msg("%s", err.msg);
  expect_ids(t, "a  b", 0, IDS(3, 4, 3, 3, 5));
  expect_ids(t, "acb", 0, IDS(3, 4, 0, 5));
  expect_decode(t, "a \xe2\x81\x87 b", IDS(3, 4, 0, 5));
  TokenList ids = {0};
  token_list_push(&ids, 42);
  assert_int_equal(tokenizer_encode(t, "ab\0a\xffz", 6, 0, &ids, &err), -1);
  assert_non_null(strstr(err.msg, "byte 4 of the text is 0xFF"));
  assert_int_equal(ids.n, 1); /* what was there stays, nothing is added */
  token_list_free(&ids);
  tokenizer_free(t);
  free(path);
}

static bool loads_with_table(const void *table, size_t len) {
  Bytes model = tiny_model(table, len);
  return loads(model.v, model.n);
}

/* The library would follow these tables out of bounds. */
static void test_damaged_table(void **state) {
  (void)state;
  enum { UNITS = 512, HAS_VALUE = 0x100, A = 'a' };
  const uint32_t value = 0x80000000;
  struct {
    uint32_t size, unit[UNITS];
    char text[4];
  } table = {.size = UNITS * 4, .text = "b"};
  /* "a" becomes "b": root -> unit 'a' (its label), whose children start at 256; child 0 is a value
   */
  uint32_t a = A | HAS_VALUE | (A ^ 256) << 10;
  table.unit[A] = a;
  table.unit[256] = value;
  assert_true(loads_with_table(&table, sizeof table));
  char *path = fs_join(test_tmp(), "any.model");
  Error err = {""};
  Tokenizer *t = tokenizer_load(path, &err);
  expect_ids(t, "ab", 0, IDS(3, 5, 5)); /* the table is in use */
  tokenizer_free(t);
  free(path);
  table.unit[A] = A | HAS_VALUE | 0xfffu << 10; /* children beyond the end */
  assert_false(loads_with_table(&table, sizeof table));
  table.unit[A] = a;
  table.unit[256] = value | 4; /* a replacement beyond the end */
  assert_false(loads_with_table(&table, sizeof table));
  table.unit[256] = value;
  table.unit[0] = value; /* a root without children */
  assert_false(loads_with_table(&table, sizeof table));
  table.unit[0] = 0;
  table.text[3] = 'z'; /* no NUL behind the last replacement */
  assert_false(loads_with_table(&table, sizeof table));
  table.text[3] = 0;
  table.size = 0xfffffff0; /* a trie larger than the file */
  assert_false(loads_with_table(&table, sizeof table));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_bos_and_eos),      cmocka_unit_test(test_added_tokens),
    cmocka_unit_test(test_templates),        cmocka_unit_test(test_older_files),
    cmocka_unit_test(test_prefix_rules),     cmocka_unit_test(test_wrong_config),
    cmocka_unit_test(test_other_tokenizers), cmocka_unit_test(test_model_and_json),
    cmocka_unit_test(test_truncated),        cmocka_unit_test(test_damaged),
    cmocka_unit_test(test_no_byte_tokens),   cmocka_unit_test(test_damaged_table),
};
TEST_MAIN(tests)
