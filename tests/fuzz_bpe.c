/* Fuzz target: tokenizer.json, and behind a byte 0x1E a text. What does not load must say where;
 * with what loads, any text comes back as it was, but for what the tokenizer is told to do to it,
 * and no text becomes a special token. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "generation/tokenizer.h"
#include "tests/fuzz.h"

/* Every byte that the texts have, in the spelling of the format. */
#define BYTES                                                                          \
  "\"a\":0,\"b\":1,\"\\u0120\":2,\"1\":3,\"\\u010a\":4,\"<\":5,\">\":6,\"\\u00c3\":7," \
  "\"\\u00a9\":8,\"\\u00ff\":9,\"e\":10,\"\\u00cc\":11,\"\\u0123\":12,\"'\":13,\"s\":14"
#define BEHIND_SPLITS "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SPLIT                                                                             \
  "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:'s)|[^\\\\r\\\\n\\\\p{L}]?\\\\p{L}+|" \
  "\\\\p{N}{1,3}|\\\\s+(?!\\\\S)\"},\"behavior\":\"Isolated\"}"
#define TOKENS                                                               \
  "[{\"id\":17,\"content\":\"<s>\",\"special\":true},"                       \
  "{\"id\":18,\"content\":\"b1\",\"normalized\":true,\"single_word\":true}," \
  "{\"id\":19,\"content\":\"a\\u00e9\",\"lstrip\":true}]"
#define TEMPLATE                                                                      \
  "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}}," \
  "{\"Sequence\":{\"id\":\"A\"}}]}"
#define TEXT \
  "\x1e a\xc3\xa9<s> ab1 e\xcc\x81\xff's\n<s>bbb aab  1 aaaabbbb abs <s <s>\xc3 e\xcc 'S\n\n a"

/* GPT-2's manner; everything at once; nothing but bytes. */
#define GPT2                                                                  \
  "{\"model\":{\"type\":\"BPE\",\"vocab\":{" BYTES                            \
  ",\"ab\":15,\"\\u0120a\":16},"                                              \
  "\"merges\":[\"a b\",\"\\u0120 a\"]},\"decoder\":{\"type\":\"ByteLevel\"}," \
  "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}}"
#define ALL                                                                                     \
  "{\"added_tokens\":" TOKENS ",\"normalizer\":{\"type\":\"NFC\"},\"model\":{\"vocab\":{" BYTES \
  ",\"\\u00c3\\u00a9\":15,\"abs\":16},\"merges\":[[\"\\u00c3\",\"\\u00a9\"]],"                  \
  "\"ignore_merges\":true},\"post_processor\":" TEMPLATE                                        \
  ",\"pre_tokenizer\":"                                                                         \
  "{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT                                            \
  ",{\"type\":\"Digits\",\"individual_digits\":true}," BEHIND_SPLITS "]}}"
#define BARE "{\"model\":{\"vocab\":{" BYTES "},\"merges\":[]},\"pre_tokenizer\":" BEHIND_SPLITS "}"

const FuzzSeed fuzz_seeds[] = {FUZZ_SEED(GPT2 TEXT), FUZZ_SEED(ALL TEXT TEXT),
                               FUZZ_SEED(BARE TEXT)};
const int fuzz_n_seeds = sizeof fuzz_seeds / sizeof *fuzz_seeds;

/* A folder of this process, removed at exit, whose tokenizer.json lies in memory. */
static char folder[] = "/tmp/rlhf-fuzz-XXXXXX";
static void remove_folder(void) { fs_remove_tree(folder, NULL); }

static int make_folder(void) {
  char target[64];
  int fd = fuzz_file(NULL, 0, target);
  if (!mkdtemp(folder) || atexit(remove_folder)) die("cannot make %s", folder);
  char *path = fs_join(folder, "tokenizer.json");
  if (symlink(target, path) != 0) die("cannot make %s", path);
  free(path);
  return fd;
}

static void write_file(const uint8_t *data, size_t len) {
  static int fd = -1;
  if (fd < 0) fd = make_folder();
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, len, 0) != (ssize_t)len) die("cannot write");
}

/* Nothing in the tokenizer changes text for good. */
static bool keeps_text(const Tokenizer *t) {
  bool keeps = !t->nfc && !t->prefix;
  for (int i = 0; i < t->n_added; i++) keeps &= !t->added[i].lstrip && !t->added[i].rstrip;
  return keeps;
}

static void check_text(const Tokenizer *t, const char *text, size_t len) {
  Error err = {""};
  TokenList ids = {0};
  size_t n;
  int rc = tokenizer_encode(t, text, len, 0, &ids, &err);
  if (rc && (ids.n > 0 || !*err.msg)) die("an error with ids, or without a message");
  for (int i = 0; i < ids.n; i++) {
    int added = t->added_of[ids.v[i]];
    if (added >= 0 && t->added[added].special) die("text became \"%s\"", t->added[added].text);
  }
  char *back = tokenizer_decode(t, ids.v, ids.n, &n, &err);
  if (!back) die("%s", err.msg);
  if (!rc && keeps_text(t) && (n != len || memcmp(back, text, n) != 0))
    die("%zu bytes come back as %zu: %s", len, n, back);
  free(back);
  if (!rc && tokenizer_encode(t, text, len, TOK_SPECIAL, &ids, &err) != 0) die("%s", err.msg);
  token_list_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  const uint8_t *mark = len ? memchr(data, 0x1e, len) : NULL;
  size_t json = mark ? (size_t)(mark - data) : len;
  Error err = {""};
  write_file(data, json);
  Tokenizer *t = tokenizer_load(folder, &err);
  if (!t) {
    if (strncmp(err.msg, folder, strlen(folder)) != 0) die("no place in \"%s\"", err.msg);
    return 0;
  }
  if (mark) check_text(t, (const char *)mark + 1, len - json - 1);
  tokenizer_free(t);
  return 0;
}
