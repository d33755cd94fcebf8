/* The tokenizer: known ids, exact round trips of any bytes, streaming, special tokens. */
#include "core/fs.h"
#include "core/json.h"
#include "core/rng.h"
#include "tests/tokens_test.h"

static Tokenizer *load(const char *below) {
  Error err = {""};
  Tokenizer *t = tokenizer_load(test_path(below), &err);
  if (!t) fail_msg("%s", err.msg);
  return t;
}

static Tokenizer *mistral(void) { return load("data/tokenizers/mistral-v1/tokenizer.model"); }
static Tokenizer *stories(void) { return load("data/stories260K"); }

/* Calls use with every part of a file between separators. */
static void each_text(const char *path, const char *separator, size_t most,
                      void (*use)(const Tokenizer *, const char *, size_t), const Tokenizer *t) {
  Error err = {""};
  size_t len, n = 0;
  char *data = fs_read(path, &len, &err), *s = data;
  if (!data) die("%s", err.msg);
  for (char *end; (end = strstr(s, separator)) && n < most; s = end + strlen(separator), n++)
    use(t, s, (size_t)(end - s));
  assert_true(n > 40);
  free(data);
}

static void exact(const Tokenizer *t, const char *s, size_t len) {
  expect_round_trip(t, s, len, 0);
  expect_round_trip(t, s, len, TOK_BOS);
}

/* What a model that squeezes spaces makes of a text. */
static void squeezed(const Tokenizer *t, const char *s, size_t len) {
  char *want = mem_alloc(len + 1, 1);
  size_t n = 0;
  for (size_t i = 0; i < len; i++)
    if (s[i] != ' ' || (n > 0 && want[n - 1] != ' ')) want[n++] = s[i];
  while (n > 0 && want[n - 1] == ' ') n--;
  want[n] = 0;
  TokenList ids = tokens_of(t, s, len, 0);
  expect_text(t, ids, want, n);
  token_list_free(&ids);
  free(want);
}

/* Any cut: what the first k ids say is the start of what all say. Every cut of the text, encoded in
 * two parts, reads as the whole. */
static void streams(const Tokenizer *t, const char *s, size_t len) {
  Error err = {""};
  TokenList ids = tokens_of(t, s, len, TOK_BOS);
  for (int k = 0; k <= ids.n; k++) {
    size_t n;
    char *part = tokenizer_decode(t, ids.v, k, &n, &err);
    assert_true(n <= len && memcmp(part, s, n) == 0);
    assert_int_equal(part[n], 0);
    free(part);
  }
  token_list_free(&ids);
  for (size_t cut = 1; cut < len && cut < 60; cut++) {
    ids = tokens_of(t, s, cut, 0);
    assert_int_equal(tokenizer_encode(t, s + cut, len - cut, TOK_CONTINUE, &ids, &err), 0);
    expect_text(t, ids, s, len);
    token_list_free(&ids);
  }
}

static void test_known_ids(void **state) {
  (void)state;
  Tokenizer *t = mistral();
  assert_int_equal(tokenizer_vocab_size(t), 32000);
  assert_int_equal(tokenizer_bos(t), 1);
  assert_int_equal(tokenizer_eos(t), 2);
  assert_true(tokenizer_adds_bos(t));
  expect_ids(t, "Hello, world", TOK_BOS, IDS(1, 22557, 28725, 1526));
  expect_ids(t, "", TOK_BOS, IDS(1));
  expect_ids(t, "", 0, 0, NULL);
  expect_ids(t, "\xf0\x9f\xa6\x99", TOK_CONTINUE, IDS(243, 162, 169, 156)); /* a llama: bytes + 3 */
  tokenizer_free(t);
}

static void test_round_trips(void **state) {
  (void)state;
  const char *texts = test_path("data/tokenizers/ggml-vocab-llama-spm.gguf.inp");
  const char *tales = test_path("data/tinystories/tinystories_sample.txt");
  Tokenizer *t = mistral();
  each_text(texts, "\n__ggml_vocab_test__\n", 100, exact, t);
  each_text(texts, "\n__ggml_vocab_test__\n", 100, streams, t);
  each_text(tales, "<|endoftext|>", 100, exact, t);
  tokenizer_free(t);
  t = stories();
  each_text(texts, "\n__ggml_vocab_test__\n", 100, squeezed, t);
  each_text(tales, "<|endoftext|>", 100, squeezed, t);
  tokenizer_free(t);
}

static void test_any_bytes(void **state) {
  (void)state;
  Tokenizer *t = mistral();
  char s[48];
  for (int a = 0; a < 256; a++) {
    s[0] = (char)a;
    exact(t, s, 1);
    for (int b = 0; b < 256; b += 7) {
      s[1] = (char)b, s[2] = ' ', s[3] = 'x';
      exact(t, s, 4);
    }
  }
  for (uint64_t i = 0; i < 1000; i++) {
    RngBlock r = rng_block(1, 2, i);
    size_t len = r.v[0] % sizeof s;
    for (size_t k = 0; k < len; k++) {
      RngBlock c = rng_block(3, i, k);
      /* half ASCII, half bytes that open or go on a character */
      s[k] = (char)(c.v[0] % 2 ? c.v[1] % 128 : c.v[1] % 256);
    }
    exact(t, s, len);
    if (i % 20 == 0) streams(t, s, len);
  }
  tokenizer_free(t);
}

static void test_unicode_edges(void **state) {
  (void)state;
  Tokenizer *t = mistral();
  static const char *const valid[] = {
      "\xc2\x80",         "\xe0\xa0\x80", "\xed\x9f\xbf",     "\xee\x80\x80", "\xf0\x90\x80\x80",
      "\xf4\x8f\xbf\xbf", "\xef\xbf\xbd", "\xef\xbb\xbfmark", "e\xcc\x81",    "\xe2\x80\x8d"};
  static const char *const broken[] = {"\xc0\x80",         "\xc1\xbf",         "\xe0\x9f\xbf",
                                       "\xed\xa0\x80",     "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
                                       "\xf5\x80\x80\x80", "\xff\xfe",         "\x80",
                                       "\xe2\x82",         "\xf0\x9f\xa6"};
  for (size_t i = 0; i < sizeof valid / sizeof *valid; i++) {
    exact(t, valid[i], strlen(valid[i]));
    streams(t, valid[i], strlen(valid[i]));
  }
  for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
    size_t len = strlen(broken[i]);
    exact(t, broken[i], len);
    TokenList ids =
        tokens_of(t, broken[i], len, 0); /* each bad byte is its own token, id byte + 3 */
    assert_int_equal(ids.n, len);
    for (size_t k = 0; k < len; k++) assert_int_equal(ids.v[k], (uint8_t)broken[i][k] + 3);
    token_list_free(&ids);
  }
  /* The one text that does not come back: SentencePiece's own sign for a space. */
  TokenList ids = tokens_of(t, "a\xe2\x96\x81z", 5, 0);
  expect_text(t, ids, "a z", 3);
  token_list_free(&ids);
  tokenizer_free(t);
}

static void test_special_tokens(void **state) {
  (void)state;
  Tokenizer *t = mistral();
  assert_int_equal(tokenizer_special(t, "<s>"), 1);
  assert_int_equal(tokenizer_special(t, "</s>"), 2);
  assert_int_equal(tokenizer_special(t, "Hello"), -1);
  static const char text[] = "<s>Hello</s></s><unk> </s";
  TokenList plain = tokens_of(t, text, strlen(text), 0);
  for (int i = 0; i < plain.n; i++) assert_true(plain.v[i] > 2); /* text cannot forge them */
  expect_text(t, plain, text, strlen(text));
  token_list_free(&plain);
  TokenList ids = tokens_of(t, text, strlen(text), TOK_SPECIAL);
  assert_int_equal(ids.v[0], 1);
  assert_int_equal(ids.v[1], 22557);
  assert_int_equal(ids.v[2], 2);
  assert_int_equal(ids.v[3], 2);
  assert_int_equal(ids.v[4], 0);
  token_list_free(&ids);
  expect_ids(t, "<s>Hello", TOK_BOS | TOK_SPECIAL, IDS(1, 22557));       /* one BOS */
  expect_ids(t, "<s><s>Hello", TOK_BOS | TOK_SPECIAL, IDS(1, 1, 22557)); /* asked for, twice */
  expect_ids(t, "Hello</s>", TOK_BOS | TOK_SPECIAL, IDS(1, 22557, 2));
  ids = tokens_of(t, "Hello</s>", 9, TOK_BOS | TOK_SPECIAL);
  expect_text(t, ids, "Hello", 5);
  token_list_free(&ids);
  tokenizer_free(t);
}

static void test_golden_text(void **state) {
  (void)state;
  Error err = {""};
  json_t *golden = json_read(test_path("data/stories260K/golden_greedy.json"), &err);
  size_t len;
  char *want = fs_read(test_path("data/stories260K/expected_stdout.txt"), &len, &err);
  if (!golden || !want) die("%s", err.msg);
  while (len > 0 && want[len - 1] == '\n') len--;
  Tokenizer *t = stories();
  assert_int_equal(tokenizer_vocab_size(t), 512);
  const json_t *v = json_object_get(golden, "greedy_ids");
  TokenList ids = {0};
  for (size_t i = 0; i < json_array_size(v); i++)
    token_list_push(&ids, (int32_t)json_integer_value(json_array_get(v, i)));
  char *got = tokenizer_decode(t, ids.v, ids.n, NULL, &err);
  assert_memory_equal(got, want, len);
  free(got);
  token_list_free(&ids);
  tokenizer_free(t);
  free(want);
  json_decref(golden);
}

static void test_decode_out_of_range(void **state) {
  (void)state;
  Tokenizer *t = stories();
  static const int32_t bad[] = {512, -1, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    Error err = {""};
    int32_t ids[] = {5, bad[i], 7};
    assert_null(tokenizer_decode(t, ids, 3, NULL, &err));
    assert_non_null(strstr(err.msg, "token 2 of 3"));
    assert_non_null(strstr(err.msg, "512"));
  }
  tokenizer_free(t);
}

static void test_endless_text(void **state) {
  (void)state;
  enum { TOO_LONG = (8 << 20) + 1 };
  Tokenizer *t = stories();
  char *text = mem_alloc(TOO_LONG, 1);
  memset(text, 'a', TOO_LONG);
  TokenList out = {0};
  Error err = {""};
  assert_int_equal(tokenizer_encode(t, text, TOO_LONG, 0, &out, &err), -1);
  assert_string_equal(err.msg,
                      "a text of 8388609 bytes is longer than SentencePiece is given, 8 MiB");
  token_list_free(&out);
  free(text);
  tokenizer_free(t);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_known_ids),           cmocka_unit_test(test_round_trips),
    cmocka_unit_test(test_any_bytes),           cmocka_unit_test(test_unicode_edges),
    cmocka_unit_test(test_special_tokens),      cmocka_unit_test(test_golden_text),
    cmocka_unit_test(test_decode_out_of_range), cmocka_unit_test(test_endless_text),
};
TEST_MAIN(tests)
