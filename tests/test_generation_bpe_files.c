/* The files of byte-level BPE: what tokenizer.json, vocab.json + merges.txt and
 * tokenizer_config.json say, and damaged or foreign files, each of which gives one clear error. The
 * vocabularies are made here: ids below 256 are bytes. */
#include "tests/bpe_test.h"

#define SPLIT(regex)                                    \
  "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex \
  "\"},\"behavior\":\"Isolated\",\"invert\":false}"
#define SEQUENCE(step) "{\"type\":\"Sequence\",\"pretokenizers\":[" step "," BPE_BYTE_LEVEL "]}"
#define LLAMA3                                                                           \
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| " \
  "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define QWEN2                                                                       \
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| " \
  "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define ADDED(id, text, more) "{\"id\":" #id ",\"content\":\"" text "\"" more "}"
#define SPECIAL ",\"special\":true,\"normalized\":false"

/* ---- as Llama 3's: ignore_merges, merges as pairs, BOS from a template in a sequence ---- */

#define LLAMA3_TOKENS "[" ADDED(300, "<|bos|>", SPECIAL) "," ADDED(301, "<|end|>", SPECIAL) "]"
#define LLAMA3_POST                                                                      \
  "{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\",\"trim_offsets\":"     \
  "true},{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|bos" \
  "|>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"pair\":[]}]}"

static const BpeFile llama3 = {
    .vocab = "\"12\":256,\"123\":257,\"ab\":258,\"\\u0120a\":259,\"abab\":260,\"'LL\":261",
    .merges = "[\"1\",\"2\"],[\"12\",\"3\"],[\"a\",\"b\"],[\"\\u0120\",\"a\"]",
    .model =
        "\"ignore_merges\":true,\"unk_token\":null,\"fuse_unk\":false,\"dropout\":null,"
        "\"byte_fallback\":false,\"continuing_subword_prefix\":null,"
        "\"end_of_word_suffix\":null",
    .pre = SEQUENCE(SPLIT(LLAMA3)),
    .root =
        "\"normalizer\":null,\"added_tokens\":" LLAMA3_TOKENS ",\"post_processor\":" LLAMA3_POST};

static void test_llama3(void **state) {
  (void)state;
  Tokenizer *t = bpe_load(bpe_json_folder(
      llama3, "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"eos_token\":\"<|end|>\"}"));
  assert_int_equal(tokenizer_bos(t), 300);
  assert_int_equal(tokenizer_eos(t), 301);
  assert_true(tokenizer_adds_bos(t));
  assert_int_equal(tokenizer_vocab_size(t), 302);
  expect_ids(t, "1234", TOK_BOS, IDS(300, 257, '4')); /* digits by threes */
  expect_ids(t, "abab", 0, IDS(260));                 /* a word that is a token, by no merge */
  expect_ids(t, "ababab", 0, IDS(258, 258, 258));
  expect_ids(t, " abab acb'LL", 0, IDS(' ', 258, 258, 259, 'c', 'b', 261));
  expect_ids(t, "a<|end|>", TOK_SPECIAL, IDS('a', 301));
  expect_ids(t, "<|end|>", 0, IDS('<', '|', 'e', 'n', 'd', '|', '>'));
  Error err = {""};
  TokenList ids = {0};
  token_list_push(&ids, 299); /* a hole */
  assert_null(tokenizer_decode(t, ids.v, 1, NULL, &err));
  token_list_free(&ids);
  tokenizer_free(t);
}

static void test_whole_words_are_asked_for(void **state) {
  (void)state;
  BpeFile f = llama3;
  f.model = NULL;
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  expect_ids(t, "abab'LL", 0, IDS(258, 258, '\'', 'L', 'L'));
  assert_int_equal(tokenizer_bos(t), 300);
  assert_true(tokenizer_adds_bos(t));
  assert_int_equal(tokenizer_eos(t), -1);
  tokenizer_free(t);
}

/* ---- as Qwen2's: NFC, merges as strings, no BOS ---- */

#define QWEN2_TOKENS "[" ADDED(260, "<|im_start|>", SPECIAL) "," ADDED(261, "<tool>", "") "]"

static const BpeFile qwen2 = {
    .vocab = "\"\\u00c3\\u00a9\":256,\"\\u0120\\u00c3\\u00a9\":257",
    .merges = "\"\\u00c3 \\u00a9\",\"\\u0120 \\u00c3\\u00a9\"",
    .pre = SEQUENCE(SPLIT(QWEN2)),
    .root = "\"normalizer\":{\"type\":\"NFC\"},\"added_tokens\":" QWEN2_TOKENS};

static void test_qwen2(void **state) {
  (void)state;
  Tokenizer *t = bpe_load(bpe_json_folder(
      qwen2,
      "{\"tokenizer_class\":\"Qwen2Tokenizer\",\"add_bos_token\":false,\"bos_token\":null,"
      "\"eos_token\":\"<|im_start|>\",\"add_prefix_space\":false}"));
  assert_int_equal(tokenizer_bos(t), -1);
  assert_int_equal(tokenizer_eos(t), 260);
  assert_false(tokenizer_adds_bos(t));
  expect_ids(t, "12 e\xcc\x81", 0, IDS('1', '2', 257)); /* e + acute is one character */
  expect_ids(t, "e\314\201\377e\314", 0, IDS(256, 0xff, 'e', 0xcc));
  expect_ids(t, "<|im_start|>\xc3\xa9<tool>", TOK_SPECIAL, IDS(260, 256, 261));
  expect_ids(t, "<tool>", 0, IDS(261)); /* not special: part of the vocabulary */
  TokenList ids = tokens_of(t, "e\xcc\x81", 3, 0);
  expect_text(t, ids, "\xc3\xa9", 2);
  token_list_free(&ids);
  tokenizer_free(t);
}

/* ---- added tokens ---- */

#define LEFT ADDED(300, "<L>", ",\"lstrip\":true" SPECIAL)
#define RIGHT ADDED(301, "<R>", ",\"rstrip\":true" SPECIAL)
#define LONGER ADDED(302, "<L>x", SPECIAL)
#define WORD ADDED(303, "cat", ",\"single_word\":true")
#define FIRST ADDED(304, "bc", "")
#define SECOND ADDED(305, "ab", ",\"normalized\":true") "," ADDED(306, "bd", ",\"normalized\":true")

static void test_added_tokens(void **state) {
  (void)state;
  static const char tokens[] =
      "\"added_tokens\":[" LEFT "," RIGHT "," LONGER "," WORD "," FIRST "," SECOND "]";
  BpeFile f = {.root = tokens};
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  expect_ids(t, "y \n\xe3\x80\x80<L> y", TOK_SPECIAL, IDS('y', 300, ' ', 'y'));
  expect_ids(t, "y <R> \t\xc2\x85y", TOK_SPECIAL, IDS('y', ' ', 301, 'y'));
  expect_ids(t, "<R> <L>", TOK_SPECIAL, IDS(301, 300));
  expect_ids(t, "<L>x<L>", TOK_SPECIAL, IDS(302, 300)); /* the longest wins */
  expect_ids(t, "cat cats", 0, IDS(303, ' ', 'c', 'a', 't', 's'));
  expect_ids(t, "_cat-cat", 0, IDS('_', 'c', 'a', 't', '-', 303));
  expect_ids(t, "\303\251cat", 0, IDS(0xc3, 0xa9, 'c', 'a', 't'));
  expect_ids(t, "abc", 0, IDS('a', 304)); /* first those that are not `normalized` */
  expect_ids(t, "abbc", 0, IDS(305, 304));
  expect_ids(t, "abd", 0, IDS(305, 'd'));
  expect_round_trip(t, "abc cat bc ab", 13, 0);
  tokenizer_free(t);
}

/* Text never becomes a special token, even where a merge or a whole word would make it; a role does
 * not make a token special that text needs. */
#define MADE ADDED(257, "abc", SPECIAL) "," ADDED(258, "xyz", SPECIAL)

static void test_text_makes_no_special_token(void **state) {
  (void)state;
  BpeFile f = {.vocab = "\"ab\":256,\"abc\":257,\"xyz\":258,\"de\":259",
               .merges = "\"a b\",\"ab c\",\"d e\"",
               .model = "\"ignore_merges\":true",
               .root = "\"added_tokens\":[" MADE "]"};
  Tokenizer *t = bpe_load(bpe_json_folder(f, "{\"pad_token\":\"!\",\"eos_token\":\"de\"}"));
  expect_ids(t, "abc xyz", 0, IDS(256, 'c', ' ', 'x', 'y', 'z'));
  expect_ids(t, "abcxyz", TOK_SPECIAL, IDS(257, 258));
  expect_ids(t, "!de", 0, IDS('!', 259));
  expect_ids(t, "!de", TOK_SPECIAL, IDS('!', 259));
  assert_int_equal(tokenizer_eos(t), 259);
  expect_round_trip(t, "!de abc", 7, 0);
  tokenizer_free(t);
}

/* Special tokens are found before text is brought to its normal form, in which the bytes of a
 * template could not be told from those of content. */
static void test_normalized_special(void **state) {
  (void)state;
  BpeFile f = qwen2;
  f.root =
      "\"normalizer\":{\"type\":\"NFC\"},\"added_tokens\":[{\"id\":260,\"content\":\"<s>\","
      "\"special\":true,\"normalized\":true}]";
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  Error err = {""};
  TokenList ids = {0};
  static const char text[] = "<s>e\314\201<s>", content[] = "\0\0\0\1\1\1\1\1\1";
  assert_int_equal(tokenizer_encode_template(t, text, content, sizeof text - 1, 0, &ids, &err), 0);
  static const int32_t want[] = {260, 256, '<', 's', '>'};
  assert_int_equal(ids.n, 5);
  assert_memory_equal(ids.v, want, sizeof want);
  token_list_free(&ids);
  tokenizer_free(t);
}

/* A BOS token that text can be made of is not taken for a second one and removed. */
static void test_bos_that_text_makes(void **state) {
  (void)state;
  Tokenizer *t = bpe_load(bpe_json_folder((BpeFile){0}, "{\"bos_token\":\"!\"}"));
  expect_ids(t, "!!", TOK_BOS, IDS('!', '!', '!'));
  tokenizer_free(t);
}

/* ---- pre-tokenization and configuration ---- */

static void test_pre_tokenizers(void **state) {
  (void)state;
  BpeFile f = {.vocab = "\"11\":256,\"\\u0120a\":257,\"a,\":258",
               .merges = "\"1 1\",\"\\u0120 a\",\"a ,\""};
  static const struct {
    const char *pre, *text;
    int n;
    int32_t ids[8];
  } cases[] = {
      {BPE_GPT2, "11 a,", 3, {256, 257, ','}},
      {BPE_BYTE_LEVEL, "11 a,", 3, {256, 257, ','}},
      {BPE_BYTE_LEVEL, "a,", 1, {258}},
      {"{\"type\":\"ByteLevel\",\"use_regex\":false}", "a,", 2, {257, ','}}, /* with a space */
      {"{\"type\":\"ByteLevel\",\"use_regex\":false}", " a,", 2, {257, ','}},
      {SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":true}"), "11a", 3, {'1', '1', 'a'}},
      {SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":false}"), "11a,", 2, {256, 258}},
      {SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"String\":\" a\"},\"behavior\":\"Isolated\"}"),
       "a, a,",
       3,
       {258, 257, ','}},
      {SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"String\":\".\"},\"behavior\":\"Isolated\"}"),
       "a,11",
       2,
       {258, 256}},
      {SEQUENCE("{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT("1") "," SPLIT("a") "]}"),
       "11a,",
       4,
       {'1', '1', 'a', ','}},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    f.pre = cases[i].pre;
    Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
    expect_ids(t, cases[i].text, 0, cases[i].n, cases[i].ids);
    tokenizer_free(t);
  }
  f.pre = "{\"type\":\"ByteLevel\",\"use_regex\":false}";
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  expect_ids(t, "a", TOK_CONTINUE, IDS('a'));
  tokenizer_free(t);
  t = bpe_load(bpe_json_folder(f, "{\"add_prefix_space\":false}"));
  expect_ids(t, "a", 0, IDS('a'));
  tokenizer_free(t);
}

/* "Removed", inverted: only what matches is kept. Text that would be lost is refused. */
static void test_pattern_that_covers(void **state) {
  (void)state;
  BpeFile f = {.pre =
                   SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a-z ]+\"},\"behavior\":"
                            "\"Removed\",\"invert\":true}")};
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  expect_ids(t, "ab c", 0, IDS('a', 'b', ' ', 'c'));
  Error err = {""};
  TokenList ids = {0};
  assert_int_equal(tokenizer_encode(t, "ab3c", 4, 0, &ids, &err), -1);
  assert_non_null(strstr(err.msg, "byte 2 of the text"));
  assert_int_equal(ids.n, 0);
  token_list_free(&ids);
  tokenizer_free(t);
}

static void test_bos(void **state) {
  (void)state;
  static const struct {
    const char *config;
    int bos, adds;
  } cases[] = {{NULL, 300, 1},
               {"{\"tokenizer_class\":\"PreTrainedTokenizerFast\"}", 300, 1},
               {"{\"bos_token\":\"<|bos|>\"}", 300, 1},
               {"{\"bos_token\":null}", 300, 1},
               {"{\"add_bos_token\":false,\"bos_token\":\"<|bos|>\"}", 300, 0},
               {"{\"add_bos_token\":null,\"bos_token\":\"<|bos|>\"}", 300, 1},
               {"{\"add_bos_token\":true,\"bos_token\":\"<|end|>\"}", 301, 1},
               {"{\"add_bos_token\":false,\"bos_token\":null}", -1, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Tokenizer *t = bpe_load(bpe_json_folder(llama3, cases[i].config));
    assert_int_equal(tokenizer_bos(t), cases[i].bos);
    assert_int_equal(tokenizer_adds_bos(t), cases[i].adds);
    tokenizer_free(t);
  }
  BpeFile f = {.vocab = "\"<|bos|>\":300", .root = "\"post_processor\":" LLAMA3_POST};
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL)); /* a template's token need not be added */
  expect_ids(t, "<|bos|>a", TOK_SPECIAL, IDS(300, 'a'));
  tokenizer_free(t);
  bpe_refuse(bpe_json_folder(llama3, "{\"bos_token\":\"<|end|>\"}"),
             "the post_processor puts token 300 first, but bos_token is 301");
}

/* ---- vocab.json and merges.txt ---- */

static const char *files_folder(const char *vocab, const char *merges, const char *config) {
  const char *dir = bpe_folder();
  char *text;
  size_t len;
  FILE *f = open_memstream(&text, &len);
  bpe_put_vocab(f, vocab);
  if (fclose(f) != 0) die("out of memory");
  bpe_put_file(dir, "vocab.json", text, len);
  if (merges) bpe_put_file(dir, "merges.txt", merges, strlen(merges));
  if (config) bpe_put_file(dir, "tokenizer_config.json", config, strlen(config));
  free(text);
  return dir;
}

static void test_vocab_and_merges(void **state) {
  (void)state;
  static const char vocab[] = "\"ab\":256,\"#ab\":257,\"<|endoftext|>\":258";
  Tokenizer *t = bpe_load(files_folder(vocab, "#version: 0.2\r\na b\r\n\r\n# ab", NULL));
  expect_ids(t, "ab#ab", 0, IDS(256, '#', 256)); /* GPT-2's pattern parts them */
  expect_ids(t, "abab", TOK_BOS, IDS(258, 256, 256));
  assert_int_equal(tokenizer_eos(t), 258);
  assert_false(tokenizer_adds_bos(t));
  tokenizer_free(t);
  t = bpe_load(files_folder(vocab, "a b\n# ab\n", "{\"tokenizer_class\":\"Qwen2Tokenizer\"}"));
  expect_ids(t, "#ab", 0, IDS(257)); /* Qwen2's takes a sign before letters */
  assert_int_equal(tokenizer_bos(t), -1);
  assert_int_equal(tokenizer_eos(t), 258);
  expect_ids(t, "e\314\201", 0, IDS(0xc3, 0xa9)); /* and brings text to normal form C */
  tokenizer_free(t);
}

/* Bytes that are no UTF-8 are one word as long as they follow each other. */
static void test_broken_bytes(void **state) {
  (void)state;
  BpeFile f = {.vocab = "\"\\u00ff\\u00fe\":256,\"\\u00c3\\u00a9\":257",
               .merges = "\"\\u00ff \\u00fe\",\"\\u00c3 \\u00a9\""};
  Tokenizer *t = bpe_load(bpe_json_folder(f, NULL));
  expect_ids(t, "a\377\376\377\303\251\303", 0, IDS('a', 256, 0xff, 257, 0xc3));
  tokenizer_free(t);
}

/* A key with a character that stands for no byte is that text itself: it may have a role, and reads
 * as it is spelled, but words never become it. */
static void test_literal_keys(void **state) {
  (void)state;
  BpeFile f = {.vocab =
                   "\"<\\u2581>\":256,\"\\u2581\":257,\"\\u00e2\\u0138\\u0123\":258,"
                   "\"\\u00e2\\u0138\\u0123a\":259",
               .model = "\"ignore_merges\":true"};
  Tokenizer *t = bpe_load(bpe_json_folder(f, "{\"eos_token\":\"<\\u2581>\"}"));
  assert_int_equal(tokenizer_eos(t), 256);
  expect_ids(t, "\342\226\201", 0, IDS(258)); /* the same three bytes, as bytes */
  expect_ids(t, "<\342\226\201>", TOK_SPECIAL, IDS(256));
  TokenList ids = {0};
  token_list_push(&ids, 257);
  expect_text(t, ids, "\342\226\201", 3);
  token_list_free(&ids);
  tokenizer_free(t);
  f.merges = "\"\\u2581 a\"";
  bpe_refuse(bpe_json_folder(f, NULL), "is not in the vocabulary");
}

/* Of a pair that comes twice, the last counts. */
static void test_merge_order(void **state) {
  (void)state;
  static const char vocab[] = "\"ab\":256,\"bc\":257";
  Tokenizer *t = bpe_load(files_folder(vocab, "a b\nb c\n", NULL));
  expect_ids(t, "abc", 0, IDS(256, 'c'));
  tokenizer_free(t);
  t = bpe_load(files_folder(vocab, "a b\nb c\na b\n", NULL));
  expect_ids(t, "abc", 0, IDS('a', 257));
  tokenizer_free(t);
}

static void test_wrong_vocab_and_merges(void **state) {
  (void)state;
  bpe_refuse(files_folder("", NULL, NULL), "merges.txt");
  bpe_refuse(files_folder("\"ab\":256", "a b\na bc\n", NULL),
             "merges.txt:2: merge \"a bc\": \"bc\" is not in the vocabulary");
  bpe_refuse(files_folder("\"ab\":256", "b a\n", NULL),
             "merges.txt:1: merge \"b a\": \"ba\" is not in the vocabulary");
  bpe_refuse(files_folder("", "a\n", NULL), "merges.txt:1: \"a\": expected two tokens");
  bpe_refuse(files_folder("", "#version\n\na b c\n", NULL), "merges.txt:3: \"a b c\"");
  bpe_refuse(files_folder("\"ab\":255", "", NULL), "id 255 is another token's already");
  bpe_refuse(files_folder("\"a\":256", "", NULL), "\"a\"");
  bpe_refuse(files_folder("\"ab\":\"256\"", "", NULL), "vocab.json: token \"ab\"");
  bpe_refuse(files_folder("\"ab\":-1", "", NULL), "id -1");
  bpe_refuse(files_folder("\"ab\":99999999999", "", NULL), "id 99999999999");
  bpe_refuse(files_folder("\"\":256", "", NULL), "id 256 is empty");
  bpe_refuse(files_folder("", "", "{\"tokenizer_class\":\"LlamaTokenizer\"}"),
             "LlamaTokenizer with vocab.json alone");
  bpe_refuse(files_folder("", "", "{\"tokenizer_class\":\"RobertaTokenizer\"}"),
             "RobertaTokenizer is not supported");
}

/* ---- tokenizer.json that is refused ---- */

static void test_other_kinds(void **state) {
  (void)state;
  static const struct {
    const char *text, *what;
  } cases[] = {
      {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "model.type: Unigram is not supported"},
      {"{\"model\":{\"type\":\"WordPiece\"}}", "model.type: WordPiece is not supported"},
      {"{\"model\":{\"type\":\"WordLevel\"}}", "model.type: WordLevel is not supported"},
      {"{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true}}", "byte_fallback"},
      {"{\"model\":{\"type\":5}}", "type"},
      {"{\"model\":[]}", "model: found an array"},
      {"{}", "model: found nothing"},
      {"[]", "expected an object"},
      {"{\"model\":{\"vocab\":{}},\"pre_tokenizer\":" BPE_GPT2 "}", "model.vocab"},
      {"{\"model\":{\"vocab\":[]},\"pre_tokenizer\":" BPE_GPT2 "}", "model.vocab"},
      {"{\"model\":{\"vocab\":{\"a\":0}},\"pre_tokenizer\":" BPE_GPT2 "}", "model.merges"},
      {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}", "only byte-level BPE is supported"},
      {"{\"model\":{\"vocab\":{\"a\":0,\"a\":1},\"merges\":[]}}", "\"a\""},
      {"", "tokenizer.json"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *dir = bpe_folder();
    bpe_put_file(dir, "tokenizer.json", cases[i].text, strlen(cases[i].text));
    bpe_refuse(dir, cases[i].what);
  }
}

static void refuse_root(const char *root, const char *what) {
  bpe_refuse(bpe_json_folder((BpeFile){.root = root}, NULL), what);
}
static void refuse_pre(const char *pre, const char *what) {
  bpe_refuse(bpe_json_folder((BpeFile){.pre = pre}, NULL), what);
}
static void refuse_model(const char *model, const char *what) {
  bpe_refuse(bpe_json_folder((BpeFile){.model = model}, NULL), what);
}
static void refuse_merges(const char *merges, const char *what) {
  bpe_refuse(bpe_json_folder((BpeFile){.vocab = "\"ab\":256", .merges = merges}, NULL), what);
}

static void test_wrong_steps(void **state) {
  (void)state;
  refuse_root("\"normalizer\":{\"type\":\"Lowercase\"}", "normalizer: Lowercase is not supported");
  refuse_root(
      "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":"
      "\"Prepend\"}]}",
      "normalizer: Prepend is not supported");
  refuse_root("\"normalizer\":{\"type\":\"Sequence\"}", "normalizers");
  refuse_root("\"normalizer\":5", "normalizer: found a");
  refuse_pre("{\"type\":\"Metaspace\"}", "pre_tokenizer: Metaspace is not supported");
  refuse_pre("null", "only byte-level BPE");
  refuse_pre("{\"type\":\"Digits\"}", "only byte-level BPE");
  refuse_pre("{\"type\":\"Sequence\",\"pretokenizers\":[" BPE_GPT2 ",{\"type\":\"Digits\"}]}",
             "Digits is not supported; expected nothing behind ByteLevel");
  refuse_pre(
      "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\"},{\"type\":"
      "\"ByteLevel\"}]}",
      "add_prefix_space");
  refuse_pre("{\"type\":\"ByteLevel\",\"use_regex\":1}", "use_regex");
  refuse_pre(SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":"
                      "\"MergedWithNext\"}"),
             "behavior MergedWithNext");
  refuse_pre(SEQUENCE("{\"type\":\"Split\",\"pattern\":\"a\",\"behavior\":\"Isolated\"}"),
             "pattern");
  refuse_pre(SEQUENCE(SPLIT("(a")), "pattern \"(a\"");
  refuse_pre(SEQUENCE(SPLIT("\\\\w+")), "\"\\w\" at byte 0 is not supported");
  refuse_pre(SEQUENCE(SPLIT("")), "the pattern is empty");
  refuse_root("\"decoder\":{\"type\":\"WordPiece\"}", "decoder");
  refuse_root("\"post_processor\":{\"type\":\"RobertaProcessing\"}",
              "post_processor: RobertaProcessing is not supported");
  refuse_root("\"post_processor\":{\"type\":\"TemplateProcessing\"}", "single");
  refuse_root(
      "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
      "\"id\":\"<x>\"}},{\"Sequence\":{\"id\":\"A\"}}]}",
      "\"<x>\" is not in the vocabulary");
  refuse_root(
      "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
      "\"id\":\"a\"}},{\"SpecialToken\":{\"id\":\"b\"}},{\"Sequence\":{\"id\":\"A\"}}]}",
      "several tokens");
}

static void test_wrong_model(void **state) {
  (void)state;
  refuse_model("\"dropout\":0.1", "dropout");
  refuse_model("\"end_of_word_suffix\":\"</w>\"", "end_of_word_suffix");
  refuse_model("\"continuing_subword_prefix\":\"##\"", "continuing_subword_prefix");
  refuse_model("\"ignore_merges\":\"yes\"", "ignore_merges");
  refuse_merges("\"a b\",\"a c\"", "model.merges[1]: merge \"a c\": \"ac\" is not in");
  refuse_merges("[\"a\",\"bb\"]", "model.merges[0]: merge [\"a\", \"bb\"]: \"bb\" is not in");
  refuse_merges("[\"a\"]", "model.merges[0]");
  refuse_merges("[\"a\",5]", "model.merges[0]");
  refuse_merges("7", "model.merges[0]");
  refuse_merges("\"ab\"", "model.merges[0]: \"ab\": expected two tokens");
}

static void test_wrong_added_tokens(void **state) {
  (void)state;
  refuse_root("\"added_tokens\":{}", "added_tokens: found an object");
  refuse_root("\"added_tokens\":[5]", "added_tokens[0]");
  enum { MANY = 16385 };
  char *many = mem_printf("\"added_tokens\":[%0*d]", 2 * MANY - 1, 0);
  for (char *p = strchr(many, '[') + 2; *p == '0'; p += 2) *p = ',';
  refuse_root(many, "16385 added tokens; expected at most 16384");
  free(many);
  refuse_root("\"added_tokens\":[{\"id\":300}]", "added token 300");
  refuse_root("\"added_tokens\":[{\"id\":300,\"content\":\"\"}]", "300 is empty");
  refuse_root("\"added_tokens\":[{\"id\":300,\"content\":\"a\\u0000b\"}]", "added token 300");
  refuse_root("\"added_tokens\":[{\"id\":300,\"content\":\"x\"}]", "id 300 here and 120 in");
  refuse_root("\"added_tokens\":[{\"id\":120,\"content\":\"xx\"}]", "id 120 is another token's");
  refuse_root("\"added_tokens\":[" ADDED(300, "xx", "") "," ADDED(300, "yy", "") "]",
              "\"yy\": id 300 is another token's");
  refuse_root("\"added_tokens\":[" ADDED(300, "xx", "") "," ADDED(301, "xx", "") "]",
              "id 301 here and 300");
  refuse_root("\"added_tokens\":[" ADDED(120, "x", SPECIAL) "]", "special token \"x\"");
  refuse_root("\"added_tokens\":[{\"id\":300,\"content\":\"xx\",\"special\":1}]", "special");
}

/* A file that is cut anywhere is refused with one line. */
static void test_truncated(void **state) {
  (void)state;
  size_t len;
  char *text = bpe_json(llama3, &len);
  const char *dir = bpe_folder();
  for (size_t cut = 0; cut<len; cut += cut + 200> len ? 1 : 13) {
    bpe_put_file(dir, "tokenizer.json", text, cut);
    bpe_refuse(dir, "tokenizer.json");
  }
  free(text);
}

static void test_file_instead_of_folder(void **state) {
  (void)state;
  char *file = fs_join(bpe_json_folder(llama3, NULL), "tokenizer.json");
  bpe_refuse(file, "expected the folder");
  free(file);
}

/* A byte without a token is an error that names it. */
static void test_missing_byte(void **state) {
  (void)state;
  static const char text[] =
      "{\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]},\"pre_tokenizer\":" BPE_GPT2 "}";
  const char *dir = bpe_folder();
  bpe_put_file(dir, "tokenizer.json", text, strlen(text));
  Tokenizer *t = bpe_load(dir);
  expect_ids(t, "ab", 0, IDS(0, 1));
  Error err = {""};
  TokenList ids = {0};
  assert_int_equal(tokenizer_encode(t, "abac", 4, 0, &ids, &err), -1);
  assert_non_null(strstr(err.msg, "byte 3 of the text is 0x63"));
  assert_int_equal(ids.n, 0);
  token_list_free(&ids);
  tokenizer_free(t);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_llama3),
                                          cmocka_unit_test(test_whole_words_are_asked_for),
                                          cmocka_unit_test(test_qwen2),
                                          cmocka_unit_test(test_added_tokens),
                                          cmocka_unit_test(test_text_makes_no_special_token),
                                          cmocka_unit_test(test_normalized_special),
                                          cmocka_unit_test(test_bos_that_text_makes),
                                          cmocka_unit_test(test_pre_tokenizers),
                                          cmocka_unit_test(test_pattern_that_covers),
                                          cmocka_unit_test(test_bos),
                                          cmocka_unit_test(test_vocab_and_merges),
                                          cmocka_unit_test(test_broken_bytes),
                                          cmocka_unit_test(test_literal_keys),
                                          cmocka_unit_test(test_merge_order),
                                          cmocka_unit_test(test_wrong_vocab_and_merges),
                                          cmocka_unit_test(test_other_kinds),
                                          cmocka_unit_test(test_wrong_steps),
                                          cmocka_unit_test(test_wrong_model),
                                          cmocka_unit_test(test_wrong_added_tokens),
                                          cmocka_unit_test(test_truncated),
                                          cmocka_unit_test(test_file_instead_of_folder),
                                          cmocka_unit_test(test_missing_byte)};
TEST_MAIN(tests)
