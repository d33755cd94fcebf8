/* What tokenizer.json does around the model: normalizer and pre_tokenizer before it, decoder and
 * post_processor behind. Each is null, one step {"type": ..}, or a Sequence of steps. What is not
 * known here is refused by its name. */
#include <string.h>

#include "generation/tokenizer.h"

/* A place in the file, for messages: "pre_tokenizer". */
typedef struct Place {
  Tokenizer *t;
  const char *file, *key;
  Error *err;
  bool ended; /* pre_tokenizer: the ByteLevel step has been */
} Place;

typedef int (*StepUse)(Place *p, const char *type, const json_t *step);

static int refuse_step(const Place *p, const char *type, const char *expected) {
  return error_set(p->err, "%s: %s: %s is not supported; expected %s", p->file, p->key, type,
                   expected);
}

/* Calls use for the step, or for every step of a Sequence, however nested. */
static int each_step(Place *p, const json_t *step, const char *list, StepUse use) {
  if (!step || json_is_null(step)) return 0;
  const char *type = json_string_value(json_object_get(step, "type"));
  if (!type)
    return error_set(p->err, "%s: %s: found %s; expected an object with a \"type\"", p->file,
                     p->key, json_type_name(step));
  if (strcmp(type, "Sequence") != 0) return use(p, type, step);
  const json_t *steps = json_object_get(step, list);
  if (!json_is_array(steps))
    return error_set(p->err, "%s: %s: a Sequence without an array \"%s\"", p->file, p->key, list);
  for (size_t i = 0; i < json_array_size(steps); i++)
    if (each_step(p, json_array_get(steps, i), list, use)) return -1;
  return 0;
}

/* ---- before the model ---- */

static int use_normalizer(Place *p, const char *type, const json_t *step) {
  (void)step;
  if (strcmp(type, "NFC") != 0) return refuse_step(p, type, "NFC or null");
  p->t->nfc = true;
  return 0;
}

static int add_pattern(Place *p, const char *pattern, size_t len, SplitKind kind, bool covers) {
  if (pretokenizer_add(p->t->words, pattern, len, kind, covers, p->err))
    return error_prefix(p->err, "%s: %s", p->file, p->key);
  return 0;
}

/* {"type": "Split", "pattern": {"Regex": ".."}, "behavior": "Isolated", "invert": false}. Isolated
 * cuts at both ends of a match, inverted or not. "Removed", inverted, leaves out what is not
 * matched; patterns that are used so match everything. */
static int use_split(Place *p, const json_t *step) {
  const json_t *pattern = json_object_get(step, "pattern");
  const json_t *regex = json_object_get(pattern, "Regex"),
               *literal = json_object_get(pattern, "String"), *text = regex ? regex : literal;
  const char *behavior;
  bool invert;
  if (json_get_str_or(step, "behavior", p->file, "none", &behavior, p->err) ||
      json_get_bool_or(step, "invert", p->file, false, &invert, p->err))
    return -1;
  if (!json_is_string(text))
    return error_set(p->err, "%s: %s: Split: expected a \"pattern\" {\"Regex\": \"..\"}", p->file,
                     p->key);
  bool covers = strcmp(behavior, "Removed") == 0 && invert;
  if (!covers && strcmp(behavior, "Isolated") != 0)
    return error_set(p->err, "%s: %s: Split: behavior %s is not supported; expected Isolated",
                     p->file, p->key, behavior);
  return add_pattern(p, json_string_value(text), json_string_length(text),
                     regex ? SPLIT_REGEX : SPLIT_LITERAL, covers);
}

static int use_digits(Place *p, const json_t *step) {
  bool each;
  if (json_get_bool_or(step, "individual_digits", p->file, false, &each, p->err)) return -1;
  const char *pattern = each ? "\\p{N}" : "\\p{N}+";
  return add_pattern(p, pattern, strlen(pattern), SPLIT_REGEX, false);
}

static int use_byte_level(Place *p, const json_t *step) {
  bool prefix, regex;
  if (json_get_bool_or(step, "add_prefix_space", p->file, true, &prefix, p->err) ||
      json_get_bool_or(step, "use_regex", p->file, true, &regex, p->err))
    return -1;
  if (prefix && pretokenizer_steps(p->t->words) > 0)
    return error_set(
        p->err, "%s: %s: add_prefix_space behind another step is not supported; expected false",
        p->file, p->key);
  p->ended = true;
  p->t->prefix = prefix;
  return regex ? add_pattern(p, pretokenize_gpt2, strlen(pretokenize_gpt2), SPLIT_REGEX, false) : 0;
}

static int use_pre_tokenizer(Place *p, const char *type, const json_t *step) {
  if (p->ended) return refuse_step(p, type, "nothing behind ByteLevel");
  if (strcmp(type, "Split") == 0) return use_split(p, step);
  if (strcmp(type, "Digits") == 0) return use_digits(p, step);
  if (strcmp(type, "ByteLevel") == 0) return use_byte_level(p, step);
  return refuse_step(p, type, "ByteLevel, or Split and Digits before it");
}

/* ---- behind the model ---- */

/* Ids become bytes without any help; the step only has to be the one that does the same. */
static int use_decoder(Place *p, const char *type, const json_t *step) {
  (void)step;
  return strcmp(type, "ByteLevel") == 0 ? 0 : refuse_step(p, type, "ByteLevel");
}

/* [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]: one token before the text is BOS.
 * One behind it would be EOS; whether a text ends with EOS is the recipe's decision. */
static int use_template(Place *p, const json_t *step) {
  const json_t *single = json_object_get(step, "single");
  const char *first = NULL;
  if (!json_is_array(single))
    return error_set(p->err, "%s: %s: TemplateProcessing: expected an array \"single\"", p->file,
                     p->key);
  for (size_t i = 0; i < json_array_size(single); i++) {
    const json_t *part = json_array_get(single, i);
    if (json_object_get(part, "Sequence")) break;
    const char *text =
        json_string_value(json_object_get(json_object_get(part, "SpecialToken"), "id"));
    if (!text || first)
      return error_set(p->err,
                       "%s: %s: TemplateProcessing: found %s before the text; expected one "
                       "SpecialToken at most",
                       p->file, p->key, text ? "several tokens" : "an unknown part");
    first = text;
  }
  if (!first) return 0;
  int id = tokenizer_find(p->t, first, strlen(first));
  if (id < 0)
    return error_set(p->err, "%s: %s: TemplateProcessing: \"%s\" is not in the vocabulary", p->file,
                     p->key, first);
  tokenizer_make_special(p->t, first, id);
  p->t->template_bos = id;
  return 0;
}

static int use_post_processor(Place *p, const char *type, const json_t *step) {
  if (strcmp(type, "ByteLevel") == 0)
    return 0; /* about offsets in the text, which nobody asks for */
  if (strcmp(type, "TemplateProcessing") == 0) return use_template(p, step);
  return refuse_step(p, type, "ByteLevel or TemplateProcessing");
}

int tokenizer_read_steps(Tokenizer *t, const json_t *root, const char *file, Error *err) {
  Place normalizer = {t, file, "normalizer", err, false};
  Place pre = {t, file, "pre_tokenizer", err, false};
  Place decoder = {t, file, "decoder", err, false};
  t->words = pretokenizer_create();
  if (each_step(&normalizer, json_object_get(root, normalizer.key), "normalizers",
                use_normalizer) ||
      each_step(&pre, json_object_get(root, pre.key), "pretokenizers", use_pre_tokenizer) ||
      each_step(&decoder, json_object_get(root, decoder.key), "decoders", use_decoder))
    return -1;
  if (!pre.ended)
    return error_set(err, "%s: pre_tokenizer: no ByteLevel step; only byte-level BPE is supported",
                     file);
  return 0;
}

int tokenizer_read_template(Tokenizer *t, const json_t *root, const char *file, Error *err) {
  Place post = {t, file, "post_processor", err, false};
  return each_step(&post, json_object_get(root, post.key), "processors", use_post_processor);
}
