/* Small byte-level BPE tokenizers for tests: the token of byte b has id b, further ones begin at
 * 256.
 */
#ifndef BPE_TEST_H
#define BPE_TEST_H

#include <stdio.h>

#include "core/fs.h"
#include "tests/tokens_test.h"

/* The byte as vocabularies write it: printable Latin-1 as it is, the rest from U+0100 on. */
static inline void bpe_put_byte(FILE *f, int byte) {
  int c = 0x100;
  for (int b = 0; b <= byte; b++) {
    bool printable = (b > ' ' && b < 0x7f) || (b > 0xa0 && b != 0xad);
    if (b == byte) fprintf(f, "\"\\u%04x\"", (unsigned)(printable ? b : c));
    if (!printable) c++;
  }
}

/* {"..": 0, .., "..": 255, MORE}; more: `"ab": 256, ..` or "". */
static inline void bpe_put_vocab(FILE *f, const char *more) {
  fputc('{', f);
  for (int b = 0; b < 256; b++) {
    if (b) fputc(',', f);
    bpe_put_byte(f, b);
    fprintf(f, ":%d", b);
  }
  fprintf(f, "%s%s}", *more ? "," : "", more);
}

/* What goes into a tokenizer.json; "" or NULL leaves a part out. */
typedef struct BpeFile {
  const char *vocab;  /* `"ab": 256` */
  const char *merges; /* `"a b", ["ab", "c"]` */
  const char *model;  /* further members of the model: `"ignore_merges": true` */
  const char *pre;    /* pre_tokenizer; NULL: ByteLevel with GPT-2's pattern */
  const char *root;   /* further members: `"added_tokens": [..]` */
} BpeFile;

#define BPE_BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define BPE_GPT2 "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static inline const char *bpe_or(const char *s, const char *none) { return s ? s : none; }

/* The file's text; the caller frees. */
static inline char *bpe_json(BpeFile b, size_t *len) {
  char *text;
  FILE *f = open_memstream(&text, len);
  fputs("{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",\"vocab\":", f);
  bpe_put_vocab(f, bpe_or(b.vocab, ""));
  fprintf(f, ",\"merges\":[%s]%s%s},\"pre_tokenizer\":%s,\"decoder\":{\"type\":\"ByteLevel\"}%s%s}",
          bpe_or(b.merges, ""), b.model ? "," : "", bpe_or(b.model, ""), bpe_or(b.pre, BPE_GPT2),
          b.root ? "," : "", bpe_or(b.root, ""));
  if (fclose(f) != 0) die("out of memory");
  return text;
}

static inline void bpe_put_file(const char *dir, const char *name, const char *data, size_t len) {
  char *path = fs_join(dir, name);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(data, 1, len, f) != len || fclose(f) != 0) die("cannot write %s", path);
  free(path);
}

/* An empty folder. */
static inline const char *bpe_folder(void) {
  const char *dir = test_file("tokenizer");
  if (fs_remove_tree(dir, NULL) || fs_make_dirs(dir, NULL)) die("cannot make %s", dir);
  return dir;
}

/* A folder with a tokenizer.json and a tokenizer_config.json (NULL: none). */
static inline const char *bpe_json_folder(BpeFile b, const char *config) {
  const char *dir = bpe_folder();
  size_t len;
  char *text = bpe_json(b, &len);
  bpe_put_file(dir, "tokenizer.json", text, len);
  if (config) bpe_put_file(dir, "tokenizer_config.json", config, strlen(config));
  free(text);
  return dir;
}

static inline Tokenizer *bpe_load(const char *dir) {
  Error err = {""};
  Tokenizer *t = tokenizer_load(dir, &err);
  if (!t) fail_msg("%s", err.msg);
  return t;
}

/* Loading fails with one line that names the folder's file and holds `what`. */
static inline void bpe_refuse(const char *dir, const char *what) {
  Error err = {""};
  Tokenizer *t = tokenizer_load(dir, &err);
  if (t) fail_msg("loaded; expected an error with \"%s\"", what);
  if (strncmp(err.msg, dir, strlen(dir)) != 0 || strchr(err.msg, '\n') || !strstr(err.msg, what))
    fail_msg("error is \"%s\"; expected %s/...: ... %s", err.msg, dir, what);
}

#endif
