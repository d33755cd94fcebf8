/* tokenizer.json with a byte-level BPE: its model and its added tokens. What it does to text before
 * and behind the model is in tokenizer_json_steps.c. */
#include <stdlib.h>
#include <string.h>

#include "generation/tokenizer.h"

/* One merge: "a b" in older files, ["a", "b"] in newer ones. */
static int read_merge(Bpe *b, const json_t *merge, Error *err) {
  if (json_is_string(merge))
    return bpe_read_merge(b, json_string_value(merge), json_string_length(merge), err);
  const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
  if (json_array_size(merge) != 2 || !json_is_string(left) || !json_is_string(right))
    return error_set(err, "found %s; expected \"a b\" or [\"a\", \"b\"]", json_type_name(merge));
  if (bpe_add_merge(b, json_string_value(left), json_string_length(left), json_string_value(right),
                    json_string_length(right), err))
    return error_prefix(err, "merge [\"%s\", \"%s\"]", json_string_value(left),
                        json_string_value(right));
  return 0;
}

static int read_merges(Bpe *b, const json_t *merges, const char *file, Error *err) {
  if (!json_is_array(merges))
    return error_set(err, "%s: model.merges: found %s; expected an array", file,
                     json_type_name(merges));
  for (size_t i = 0; i < json_array_size(merges); i++)
    if (read_merge(b, json_array_get(merges, i), err))
      return error_prefix(err, "%s: model.merges[%zu]", file, i);
  return 0;
}

/* The kind of the model; files from before there were several have no "type". */
static int check_kind(const json_t *model, const char *file, Error *err) {
  const char *type;
  if (!json_is_object(model))
    return error_set(err, "%s: model: found %s; expected an object", file, json_type_name(model));
  if (json_get_str_or(model, "type", file, "BPE", &type, err)) return -1;
  if (strcmp(type, "BPE") != 0)
    return error_set(err, "%s: model.type: %s is not supported; expected BPE", file, type);
  return 0;
}

/* Switches of the model that would change what text becomes. */
static int check_switches(const json_t *model, const char *file, Error *err) {
  static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  bool fallback;
  if (json_get_bool_or(model, "byte_fallback", file, false, &fallback, err)) return -1;
  if (fallback)
    return error_set(err,
                     "%s: model.byte_fallback: true (BPE in SentencePiece's manner) is not "
                     "supported; expected byte-level BPE, or tokenizer.model beside this file",
                     file);
  for (size_t i = 0; i < sizeof affixes / sizeof *affixes; i++) {
    const char *affix;
    if (json_get_str_or(model, affixes[i], file, "", &affix, err)) return -1;
    if (*affix)
      return error_set(err, "%s: model.%s: \"%s\" is not supported; expected none", file,
                       affixes[i], affix);
  }
  double dropout;
  if (json_get_f64_or(model, "dropout", file, 0, &dropout, err)) return -1;
  if (dropout != 0)
    return error_set(err, "%s: model.dropout: %g is not supported; expected none", file, dropout);
  return 0;
}

static int read_model(Tokenizer *t, const json_t *model, const char *file, Error *err) {
  char *place = mem_printf("%s: model.vocab", file);
  int rc = bpe_read_vocab(t->bpe, json_object_get(model, "vocab"), place, err);
  free(place);
  if (rc || read_merges(t->bpe, json_object_get(model, "merges"), file, err) ||
      json_get_bool_or(model, "ignore_merges", file, false, &t->whole_words, err))
    return -1;
  t->vocab_size = bpe_size(t->bpe);
  return 0;
}

static int read_added(Tokenizer *t, const json_t *added, const char *file, Error *err) {
  if (!added || json_is_null(added)) return 0;
  if (!json_is_array(added))
    return error_set(err, "%s: added_tokens: found %s; expected an array", file,
                     json_type_name(added));
  if (tokenizer_check_added(json_array_size(added), file, err)) return -1;
  for (size_t i = 0; i < json_array_size(added); i++) {
    const json_t *token = json_array_get(added, i), *id = json_object_get(token, "id");
    if (!json_is_integer(id))
      return error_set(err, "%s: added_tokens[%zu]: expected {\"id\": 5, \"content\": \"..\", ..}",
                       file, i);
    if (tokenizer_read_added(t, token, json_integer_value(id), file, err)) return -1;
  }
  return 0;
}

static int read_root(Tokenizer *t, const json_t *root, const char *file, Error *err) {
  if (!json_is_object(root))
    return error_set(err, "%s: found %s; expected an object", file, json_type_name(root));
  const json_t *model = json_object_get(root, "model");
  return check_kind(model, file, err) || check_switches(model, file, err) ||
                 tokenizer_read_steps(t, root, file, err) || read_model(t, model, file, err) ||
                 read_added(t, json_object_get(root, "added_tokens"), file, err) ||
                 tokenizer_read_template(t, root, file, err)
             ? -1
             : 0;
}

int tokenizer_load_json(Tokenizer *t, const char *file, Error *err) {
  t->bpe = bpe_create();
  json_t *root = bpe_read_json(file, err);
  if (!root) return -1;
  int rc = read_root(t, root, file, err);
  json_decref(root);
  return rc;
}
