/* Byte-level BPE with published vocabularies: known ids, exact round trips of any bytes, streaming,
 * special tokens, and no text that takes forever. */
#include <time.h>

#include "core/rng.h"
#include "tests/bpe_test.h"

static Tokenizer *gpt2(void) { return bpe_load(test_path("data/tokenizers/gpt2")); }

static char *read_shared(const char *below, size_t *len) {
  Error err = {""};
  char *s = fs_read(test_path(below), len, &err);
  if (!s) fail_msg("%s", err.msg);
  return s;
}

/* Every text of llama.cpp's list, against the ids on its line. */
static void test_known_ids(void **state) {
  (void)state;
  static const char separator[] = "\n__ggml_vocab_test__\n";
  size_t len;
  char *texts = read_shared("data/tokenizers/ggml-vocab-gpt-2.gguf.inp", &len), *s = texts;
  char *lines = read_shared("data/tokenizers/ggml-vocab-gpt-2.gguf.out", &len), *line = lines;
  Tokenizer *t = gpt2();
  int n = 0;
  for (char *end; (end = strstr(s, separator)); s = end + strlen(separator), n++) {
    TokenList want = {0};
    char *next = strchr(line, '\n');
    for (char *id = line; (id = strpbrk(id, "0123456789")) && id < next;)
      token_list_push(&want, (int32_t)strtol(id, &id, 10));
    *end = 0;
    expect_ids(t, s, 0, want.n, want.v);
    token_list_free(&want);
    line = next + 1;
  }
  assert_int_equal(n, 46);
  tokenizer_free(t);
  free(texts);
  free(lines);
}

static void test_gpt2_roles(void **state) {
  (void)state;
  Tokenizer *t = gpt2();
  assert_string_equal(tokenizer_kind(t), "byte-level BPE");
  assert_int_equal(tokenizer_vocab_size(t), 50257);
  assert_int_equal(tokenizer_bos(t), 50256);
  assert_int_equal(tokenizer_eos(t), 50256);
  assert_false(tokenizer_adds_bos(t));
  assert_int_equal(tokenizer_special(t, "<|endoftext|>"), 50256);
  tokenizer_free(t);
}

/* OPT has RoBERTa's ids ("Hello world" is 31414 232 in both) and puts </s> first. */
static void test_opt(void **state) {
  (void)state;
  static const char config[] =
      "{\"tokenizer_class\": \"GPT2Tokenizer\", \"add_bos_token\": true, \"add_prefix_space\": "
      "false, \"errors\": \"replace\","
      "\"bos_token\": {\"__type\": \"AddedToken\", \"content\": \"</s>\", \"normalized\": true},"
      "\"eos_token\": {\"__type\": \"AddedToken\", \"content\": \"</s>\", \"normalized\": true},"
      "\"unk_token\": \"</s>\", \"pad_token\": \"<pad>\"}";
  static const char *const names[] = {"vocab.json", "merges.txt"};
  const char *dir = bpe_folder();
  for (int i = 0; i < 2; i++) {
    char *from = fs_join(test_path("data/tokenizers/opt"), names[i]), *to = fs_join(dir, names[i]);
    assert_int_equal(fs_copy(from, to, NULL), 0);
    free(from);
    free(to);
  }
  bpe_put_file(dir, "tokenizer_config.json", config, strlen(config));
  Tokenizer *t = bpe_load(dir);
  assert_int_equal(tokenizer_bos(t), 2);
  assert_int_equal(tokenizer_eos(t), 2);
  assert_true(tokenizer_adds_bos(t));
  assert_int_equal(tokenizer_vocab_size(t), 50265);
  expect_ids(t, "Hello world", TOK_BOS, IDS(2, 31414, 232));
  expect_ids(t, "</s>Hello<pad>", TOK_BOS | TOK_SPECIAL, IDS(2, 31414, 1));
  expect_ids(t, "</s>", 0, IDS(49138, 29, 15698)); /* "</", "s", ">" */
  tokenizer_free(t);
}

/* ---- round trips ---- */

static void test_byte_strings(void **state) {
  (void)state;
  Tokenizer *t = gpt2();
  char s[256];
  for (int a = 0; a < 256; a++) {
    s[0] = (char)a;
    expect_round_trip(t, s, 1, 0);
    for (int b = 0; b < 256; b++) {
      s[1] = (char)b;
      expect_round_trip(t, s, 2, 0);
    }
  }
  static const char bits[] =
      "\xf0\x9f\xa6\x99\xe2\x80\x8d\xc3\xa9 \n\ta1'<|endoftext|>\xff\xc0\xed\xa0";
  for (uint64_t i = 0; i < 3000; i++) { /* any bytes, then bytes that nearly are characters */
    size_t len = rng_block(21, i, 999).v[0] % sizeof s;
    for (size_t k = 0; k < len; k++) {
      uint32_t r = rng_block(21, i, k).v[0];
      s[k] = i % 2 ? (char)r : bits[r % (sizeof bits - 1)];
    }
    expect_round_trip(t, s, len, 0);
  }
  tokenizer_free(t);
}

static void test_stories(void **state) {
  (void)state;
  Tokenizer *t = gpt2();
  size_t len;
  char *s = read_shared("data/tinystories/tinystories_sample.txt", &len);
  TokenList ids = tokens_of(t, s, len, 0);
  expect_text(t, ids, s, len);
  for (int i = 0; i < ids.n; i++) assert_true(ids.v[i] != 50256); /* the file spells it often */
  assert_true((size_t)ids.n < len / 3); /* English: four bytes a token; more would be no merging */
  token_list_free(&ids);
  free(s);
  tokenizer_free(t);
}

/* What the first k ids say is the start of what all say, and a text in two parts reads as one. */
static void test_streams(void **state) {
  (void)state;
  static const char s[] =
      "\xf0\x9f\xa6\x99 na\xc3\xafve  \xe6\x97\xa5\xe6\x9c\xac\xff\n\n it's 12345 \xe2\x80";
  size_t len = sizeof s - 1;
  Error err = {""};
  Tokenizer *t = gpt2();
  TokenList ids = tokens_of(t, s, len, TOK_BOS);
  for (int k = 0; k <= ids.n; k++) {
    size_t n;
    char *part = tokenizer_decode(t, ids.v, k, &n, &err);
    assert_true(n <= len && memcmp(part, s, n) == 0);
    free(part);
  }
  token_list_free(&ids);
  for (size_t cut = 0; cut <= len; cut++) {
    ids = tokens_of(t, s, cut, 0);
    assert_int_equal(tokenizer_encode(t, s + cut, len - cut, TOK_CONTINUE, &ids, &err), 0);
    expect_text(t, ids, s, len);
    token_list_free(&ids);
  }
  tokenizer_free(t);
}

/* ---- special tokens ---- */

static void test_special(void **state) {
  (void)state;
  static const char end[] = "<|endoftext|>";
  Tokenizer *t = gpt2();
  expect_ids(t, end, TOK_SPECIAL, IDS(50256));
  expect_ids(t, "Hello<|endoftext|> world<|endoftext|>", TOK_SPECIAL,
             IDS(15496, 50256, 995, 50256));
  expect_ids(t, "<|endoftext|>Hello", TOK_SPECIAL | TOK_BOS, IDS(50256, 15496));
  expect_ids(t, end, 0, IDS(27, 91, 437, 1659, 5239, 91, 29)); /* < | end of text | > */
  expect_round_trip(t, end, strlen(end), 0);
  for (size_t cut = 0; cut <= strlen(end); cut++) { /* part template, part content */
    Error err = {""};
    TokenList ids = {0};
    char content[sizeof end];
    memset(content, 1, sizeof content);
    memset(content, 0, cut);
    assert_int_equal(tokenizer_encode_template(t, end, content, strlen(end), 0, &ids, &err), 0);
    assert_int_equal(ids.n == 1 && ids.v[0] == 50256, cut == strlen(end));
    token_list_free(&ids);
  }
  TokenList ids = {0};
  token_list_push(&ids, 15496);
  token_list_push(&ids, 50256);
  expect_text(t, ids, "Hello", 5);
  ids.v[1] = 50257;
  Error err = {""};
  assert_null(tokenizer_decode(t, ids.v, ids.n, NULL, &err));
  assert_non_null(strstr(err.msg, "token 2 of 2 is 50257"));
  token_list_free(&ids);
  tokenizer_free(t);
}

/* ---- no text takes forever ---- */

/* 300,000 bytes in one word, or as blanks, take about a tenth of a second here, and fifty times
 * that with a sanitizer on a slow machine. Merging that is quadratic in the word's length takes
 * minutes. */
static void test_long_words(void **state) {
  (void)state;
  enum { LEN = 300000, LIMIT_SECONDS = 20 };
  static const char *const units[] = {"a",   "ab", "1",    " ",        "\n",
                                      " \n", "<",  "\xff", "\xcc\x81", "' "};
  Tokenizer *t = gpt2();
  char *s = mem_alloc(LEN, 1);
  for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
    size_t n = strlen(units[u]);
    for (size_t i = 0; i < LEN; i++) s[i] = units[u][i % n];
    clock_t start = clock();
    expect_round_trip(t, s, LEN, 0);
    assert_true((clock() - start) / CLOCKS_PER_SEC < LIMIT_SECONDS);
  }
  for (size_t i = 0; i < LEN; i++) s[i] = (char)('a' + rng_block(22, i, 0).v[0] % 26);
  expect_round_trip(t, s, LEN, 0);
  free(s);
  tokenizer_free(t);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_known_ids), cmocka_unit_test(test_gpt2_roles),
    cmocka_unit_test(test_opt),       cmocka_unit_test(test_byte_strings),
    cmocka_unit_test(test_stories),   cmocka_unit_test(test_streams),
    cmocka_unit_test(test_special),   cmocka_unit_test(test_long_words)};
TEST_MAIN(tests)
