/* GPT-2's own files: vocab.json, {key: id}, and merges.txt beside it, one merge a line. How text is
 * cut into words they do not say; the class in tokenizer_config.json does (bpe_class.c). */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "generation/tokenizer.h"

int bpe_read_vocab(Bpe *b, json_t *vocab, const char *place, Error *err) {
  const char *key;
  json_t *id;
  if (!json_is_object(vocab) || json_object_size(vocab) == 0)
    return error_set(err, "%s: found %s; expected an object of tokens and their ids", place,
                     json_is_object(vocab) ? "an empty object" : json_type_name(vocab));
  json_object_foreach(vocab, key, id) {
    if (!json_is_integer(id))
      return error_set(err, "%s: token \"%s\": found %s; expected an id", place, key,
                       json_type_name(id));
    if (bpe_add_token(b, key, strlen(key), json_integer_value(id), err))
      return error_prefix(err, "%s", place);
  }
  return 0;
}

int bpe_read_merge(Bpe *b, const char *merge, size_t len, Error *err) {
  const char *space = memchr(merge, ' ', len), *end = merge + len;
  const char *right = space ? space + 1 : end;
  bool pair = space && space > merge && right < end && !memchr(right, ' ', (size_t)(end - right));
  if (!pair)
    return error_set(err, "\"%.*s\": expected two tokens and one space between", (int)len, merge);
  if (bpe_add_merge(b, merge, (size_t)(space - merge), right, (size_t)(end - right), err))
    return error_prefix(err, "merge \"%.*s\"", (int)len, merge);
  return 0;
}

/* Empty lines are passed over, and so is the first when it names a version. */
static int read_merges(Bpe *b, const char *file, Error *err) {
  static const char version[] = "#version";
  LineReader *lines = lines_open(file, err);
  if (!lines) return -1;
  const char *line;
  size_t len;
  int got, rc = 0;
  while (!rc && (got = lines_next(lines, &line, &len, err)) != 0) {
    if (got < 0) {
      rc = -1;
      break;
    }
    long long number = lines_number(lines);
    bool head = number == 1 && strncmp(line, version, strlen(version)) == 0;
    if (len == 0 || head) continue;
    rc = bpe_read_merge(b, line, len, err);
    if (rc) error_prefix(err, "%s:%lld", file, number);
  }
  lines_close(lines);
  return rc;
}

json_t *bpe_read_json(const char *file, Error *err) {
  size_t len;
  char *text = fs_read(file, &len, err);
  json_t *root = text ? json_parse_unique(text, len, file, err) : NULL;
  free(text);
  return root;
}

int tokenizer_load_vocab(Tokenizer *t, const char *file, Error *err) {
  t->bpe = bpe_create();
  json_t *vocab = bpe_read_json(file, err);
  if (!vocab) return -1;
  int rc = bpe_read_vocab(t->bpe, vocab, file, err);
  json_decref(vocab);
  if (rc) return -1;
  char *dir = fs_dirname(file), *merges = fs_join(dir, "merges.txt");
  rc = read_merges(t->bpe, merges, err);
  free(merges);
  free(dir);
  t->vocab_size = bpe_size(t->bpe);
  return rc;
}
