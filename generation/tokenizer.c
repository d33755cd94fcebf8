/* Tokenizer: loading, and what callers ask about the vocabulary. */
#include "generation/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"

void token_list_push(TokenList *l, int32_t id) {
  if (l->n == l->cap) {
    l->cap = l->cap ? 2 * l->cap : 64;
    l->v = mem_grow(l->v, (size_t)l->cap, sizeof *l->v);
  }
  l->v[l->n++] = id;
}

void token_list_free(TokenList *l) {
  free(l->v);
  *l = (TokenList){0};
}

Added *tokenizer_add(Tokenizer *t, const char *text, size_t len, int32_t id, bool special) {
  for (int i = 0; i < t->n_added; i++) {
    Added *a = &t->added[i];
    if (a->len != len || memcmp(a->text, text, len) != 0) continue;
    a->special |= special;
    return a;
  }
  t->added = mem_grow(t->added, (size_t)t->n_added + 1, sizeof *t->added);
  Added *a = &t->added[t->n_added++];
  *a = (Added){.text = mem_alloc(len + 1, 1), .len = len, .id = id, .special = special};
  memcpy(a->text, text, len);
  a->text[len] = 0;
  if (id >= t->vocab_size) t->vocab_size = id + 1;
  return a;
}

int tokenizer_find(const Tokenizer *t, const char *text, size_t len) {
  for (int i = 0; i < t->n_added; i++)
    if (t->added[i].len == len && memcmp(t->added[i].text, text, len) == 0) return t->added[i].id;
  return t->spm ? spm_find(t->spm, text, len) : bpe_find(t->bpe, text, len);
}

void tokenizer_make_special(Tokenizer *t, const char *text, int32_t id) {
  size_t len = strlen(text);
  bool from_text = t->bpe && (bpe_is_byte(t->bpe, id) || bpe_is_merged(t->bpe, id));
  for (int i = 0; i < t->n_added && from_text; i++) from_text = t->added[i].id != id;
  if (!from_text) tokenizer_add(t, text, len, id, true);
}

/* Special tokens are found before text is normalised: a template's bytes are known from content's
 * only there. */
int tokenizer_pass(const Tokenizer *t, const Added *a) {
  return t->bpe && a->normalized && !(t->nfc && a->special);
}

static int longer_first(const void *a, const void *b) {
  const Added *x = a, *y = b;
  if (x->len != y->len) return x->len < y->len ? 1 : -1;
  return strcmp(x->text, y->text);
}

/* Tables over the finished set of added tokens. */
static void index_added(Tokenizer *t) {
  if (t->n_added) qsort(t->added, (size_t)t->n_added, sizeof *t->added, longer_first);
  t->added_of = mem_alloc((size_t)t->vocab_size, sizeof *t->added_of);
  for (int i = 0; i < t->vocab_size; i++) t->added_of[i] = -1;
  for (int i = 0; i < t->n_added; i++) {
    int pass = tokenizer_pass(t, &t->added[i]);
    t->added_of[t->added[i].id] = i;
    t->starts[pass][(uint8_t)t->added[i].text[0]] = true;
    t->looks[pass] = true;
  }
}

/* The model's own tokens that text must not be cut into: control pieces and the unknown one. */
static void add_control_pieces(Tokenizer *t) {
  for (int id = 0; id < spm_size(t->spm); id++) {
    SpmKind kind = spm_kind(t->spm, id);
    size_t len;
    const char *piece = spm_piece(t->spm, id, &len);
    if (kind == SPM_CONTROL || kind == SPM_UNKNOWN) tokenizer_add(t, piece, len, id, true);
  }
}

static void find_byte_pieces(Tokenizer *t) {
  for (int b = 0; b < 256; b++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
    int id = spm_find(t->spm, name, strlen(name));
    t->byte_id[b] = id >= 0 && spm_kind(t->spm, id) == SPM_BYTE ? id : -1;
  }
}

/* tokenizer.model */
static int load_model(Tokenizer *t, const char *file, Error *err) {
  size_t len;
  char *data = fs_read(file, &len, err);
  if (!data) return -1;
  char msg[512] = "";
  if (!spm_file_check((const uint8_t *)data, len, file, &t->traits, err)) {
    t->spm = spm_open(data, len, msg, sizeof msg);
    if (!t->spm) error_set(err, "%s: SentencePiece refuses the model: %s", file, msg);
  }
  free(data);
  if (!t->spm) return -1;
  t->vocab_size = spm_size(t->spm);
  t->bos = spm_bos(t->spm);
  t->eos = spm_eos(t->spm);
  t->adds_bos = t->bos >= 0;
  t->prefix = t->traits.dummy_prefix;
  add_control_pieces(t);
  find_byte_pieces(t);
  return 0;
}

/* The files that a folder may have its tokenizer in; the first that is there is it. So a folder
 * with a SentencePiece model and its translation to tokenizer.json is SentencePiece. */
static const struct {
  const char *name;
  int (*load)(Tokenizer *t, const char *file, Error *err);
} kinds[] = {{"tokenizer.model", load_model},
             {"tokenizer.json", tokenizer_load_json},
             {"vocab.json", tokenizer_load_vocab}};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* The index into kinds, or -1; *file is the path. */
static int find_kind(const char *dir, char **file) {
  for (int i = 0; i < N_KINDS; i++) {
    *file = fs_join(dir, kinds[i].name);
    if (fs_exists(*file)) return i;
    free(*file);
  }
  *file = NULL;
  return -1;
}

bool tokenizer_exists(const char *dir) {
  char *file;
  bool there = find_kind(dir, &file) >= 0;
  free(file);
  return there;
}

static int load_folder(Tokenizer *t, const char *dir, Error *err) {
  char *file;
  int kind = find_kind(dir, &file);
  if (kind < 0)
    return error_set(
        err,
        "%s: no tokenizer in this folder; expected tokenizer.model, tokenizer.json, or "
        "vocab.json and merges.txt",
        dir);
  int rc = kinds[kind].load(t, file, err);
  free(file);
  return rc || tokenizer_read_config(t, dir, err) ? -1 : 0;
}

/* A .model file. The other files do not stand alone. */
static int load_file(Tokenizer *t, const char *file, Error *err) {
  const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file;
  for (int i = 1; i < N_KINDS; i++)
    if (strcmp(name, kinds[i].name) == 0)
      return error_set(err, "%s: expected the folder that this file is in, or a .model file", file);
  return load_model(t, file, err);
}

/* Text must not become a special token, unless it is asked to. */
static int finish_bpe(Tokenizer *t, const char *path, Error *err) {
  for (int i = 0; i < t->n_added; i++) {
    const Added *a = &t->added[i];
    if (a->special && bpe_is_byte(t->bpe, a->id))
      return error_set(err,
                       "%s: the special token \"%s\" is that of a single byte, which text needs",
                       path, a->text);
    if (a->special) bpe_forbid(t->bpe, a->id);
  }
  bpe_finish(t->bpe, t->whole_words);
  return 0;
}

Tokenizer *tokenizer_load(const char *path, Error *err) {
  Tokenizer *t = mem_zalloc(1, sizeof *t);
  t->bos = t->eos = t->template_bos = -1;
  t->prefix_each = true;
  int rc = fs_is_dir(path) ? load_folder(t, path, err) : load_file(t, path, err);
  if (!rc && t->bpe) rc = finish_bpe(t, path, err);
  if (rc) {
    tokenizer_free(t);
    return NULL;
  }
  index_added(t);
  return t;
}

void tokenizer_free(Tokenizer *t) {
  if (!t) return;
  for (int i = 0; i < t->n_added; i++) free(t->added[i].text);
  free(t->added);
  free(t->added_of);
  if (t->spm) spm_close(t->spm);
  pretokenizer_free(t->words);
  bpe_free(t->bpe);
  free(t);
}

const char *tokenizer_kind(const Tokenizer *t) {
  return t->spm ? "SentencePiece" : "byte-level BPE";
}
int tokenizer_vocab_size(const Tokenizer *t) { return t->vocab_size; }
int tokenizer_bos(const Tokenizer *t) { return t->bos; }
int tokenizer_eos(const Tokenizer *t) { return t->eos; }
bool tokenizer_adds_bos(const Tokenizer *t) { return t->adds_bos; }

int tokenizer_special(const Tokenizer *t, const char *text) {
  size_t len = strlen(text);
  for (int i = 0; i < t->n_added; i++)
    if (t->added[i].len == len && memcmp(t->added[i].text, text, len) == 0) return t->added[i].id;
  return -1;
}
