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
  return spm_find(t->spm, text, len);
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
    t->added_of[t->added[i].id] = i;
    t->starts[(uint8_t)t->added[i].text[0]] = true;
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

/* The path of the model file of a folder; NULL, naming what is there instead. */
static char *model_file(const char *dir, Error *err) {
  char *file = fs_join(dir, "tokenizer.model");
  if (fs_exists(file)) return file;
  free(file);
  static const char *const others[] = {"tokenizer.json", "vocab.json"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    char *other = fs_join(dir, others[i]);
    bool there = fs_exists(other);
    free(other);
    if (!there) continue;
    error_set(err, "%s: byte-level BPE (%s) is not supported yet; expected tokenizer.model", dir,
              others[i]);
    return NULL;
  }
  error_set(err, "%s: no tokenizer in this folder; expected tokenizer.model", dir);
  return NULL;
}

static Tokenizer *load_model(const char *file, Error *err) {
  size_t len;
  char *data = fs_read(file, &len, err);
  if (!data) return NULL;
  Tokenizer *t = mem_zalloc(1, sizeof *t);
  char msg[512] = "";
  if (!spm_file_check((const uint8_t *)data, len, file, &t->traits, err)) {
    t->spm = spm_open(data, len, msg, sizeof msg);
    if (!t->spm) error_set(err, "%s: SentencePiece refuses the model: %s", file, msg);
  }
  free(data);
  if (!t->spm) {
    tokenizer_free(t);
    return NULL;
  }
  t->vocab_size = spm_size(t->spm);
  t->bos = spm_bos(t->spm);
  t->eos = spm_eos(t->spm);
  t->adds_bos = t->bos >= 0;
  t->prefix = t->traits.dummy_prefix;
  t->prefix_each = true;
  add_control_pieces(t);
  find_byte_pieces(t);
  return t;
}

Tokenizer *tokenizer_load(const char *path, Error *err) {
  bool folder = fs_is_dir(path);
  char *file = folder ? model_file(path, err) : mem_strdup(path);
  if (!file) return NULL;
  Tokenizer *t = load_model(file, err);
  free(file);
  if (t && folder && tokenizer_read_config(t, path, err)) {
    tokenizer_free(t);
    return NULL;
  }
  if (t) index_added(t);
  return t;
}

void tokenizer_free(Tokenizer *t) {
  if (!t) return;
  for (int i = 0; i < t->n_added; i++) free(t->added[i].text);
  free(t->added);
  free(t->added_of);
  if (t->spm) spm_close(t->spm);
  free(t);
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
