/* What the class in tokenizer_config.json says that the files of a byte-level BPE do not: the
 * tokens of BOS and EOS where none are named, and, where there is only vocab.json, the pattern.
 * Classes that are not known may do to text what the files do not show: they are refused. */
#include <string.h>

#include "generation/tokenizer.h"

typedef struct BpeClass {
  const char *name;      /* with or without "Fast" behind it */
  const char *pattern;   /* for vocab.json; NULL: the class needs tokenizer.json */
  bool nfc;              /* for vocab.json */
  const char *bos, *eos; /* NULL: none unless named */
} BpeClass;

static const char end_of_text[] = "<|endoftext|>";

/* The first is that of folders that name none. */
static const BpeClass classes[] = {
    {"GPT2Tokenizer", pretokenize_gpt2, false, end_of_text, end_of_text},
    {"Qwen2Tokenizer", pretokenize_qwen2, true, NULL, end_of_text},
    {"GPTNeoXTokenizer", NULL, false, end_of_text, end_of_text},
    {"CodeGenTokenizer", NULL, false, end_of_text, end_of_text},
    {"PreTrainedTokenizer", NULL, false, NULL, NULL},
    {"TokenizersBackend", NULL, false, NULL, NULL},
    {"LlamaTokenizer", NULL, false, NULL, NULL}};

static const BpeClass *find_class(const char *name) {
  static const char fast[] = "Fast";
  size_t len = strlen(name), tail = strlen(fast);
  if (len > tail && strcmp(name + len - tail, fast) == 0) len -= tail;
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
    if (strlen(classes[i].name) == len && memcmp(classes[i].name, name, len) == 0)
      return &classes[i];
  return NULL;
}

static int default_role(Tokenizer *t, const char *text) {
  int id = text ? tokenizer_find(t, text, strlen(text)) : -1;
  if (id >= 0) tokenizer_make_special(t, text, id);
  return id;
}

int tokenizer_apply_class(Tokenizer *t, const char *name, const char *file, Error *err) {
  const BpeClass *c = name ? find_class(name) : &classes[0];
  if (!c)
    return error_set(err,
                     "%s: tokenizer_class: %s is not supported with byte-level BPE; expected one "
                     "like %s or PreTrainedTokenizerFast",
                     file, name, classes[0].name);
  if (!t->words) {
    if (!c->pattern)
      return error_set(err,
                       "%s: tokenizer_class: %s with vocab.json alone is not supported; "
                       "expected tokenizer.json beside it",
                       file, name);
    t->words = pretokenizer_create();
    t->nfc = c->nfc;
    if (pretokenizer_add(t->words, c->pattern, strlen(c->pattern), SPLIT_REGEX, false, err))
      return -1;
  }
  t->bos = default_role(t, c->bos);
  t->eos = default_role(t, c->eos);
  return 0;
}
