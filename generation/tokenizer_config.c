/* The JSON files beside a model of any kind, as transformers writes them.
 *
 * tokenizer_config.json: tokenizer_class, add_bos_token, bos_token, eos_token, ..., legacy,
 * add_prefix_space, added_tokens_decoder. special_tokens_map.json: the same token names (older
 * folders have them only there). added_tokens.json: {text: id}, before added_tokens_decoder was.
 * add_eos_token is not read: whether a text ends with EOS is the recipe's decision. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "generation/tokenizer.h"

/* Classes whose ids are SentencePiece's own. Others shift or reorder them. */
static const char *const known_classes[] = {
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast",
    "GemmaTokenizer", "GemmaTokenizerFast", "TokenizersBackend",  "PreTrainedTokenizerFast"};

/* Tokens with a role. They are special wherever they are named. */
static const char *const role_keys[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                        "sep_token", "cls_token", "mask_token"};

/* A token is spelled as a string or as {"content": string, ...}. NULL: neither, or with a NUL. */
static const char *token_text(const json_t *v) {
  if (json_is_object(v)) v = json_object_get(v, "content");
  const char *text = json_string_value(v);
  return text && strlen(text) == json_string_length(v) ? text : NULL;
}

static int read_class(Tokenizer *t, const json_t *config, const char *file, Error *err) {
  const char *name = NULL;
  if (config && json_get_str_or(config, "tokenizer_class", file, NULL, &name, err)) return -1;
  if (t->bpe) return tokenizer_apply_class(t, name, file, err);
  if (!name) return 0;
  for (size_t i = 0; i < sizeof known_classes / sizeof *known_classes; i++)
    if (strcmp(name, known_classes[i]) == 0) return 0;
  return error_set(err, "%s: tokenizer_class: %s is not supported; expected LlamaTokenizer", file,
                   name);
}

/* Byte-level BPE: text and id must not belong to two tokens of the vocabulary. */
static int check_spelling(const Tokenizer *t, const char *text, int32_t id, const char *file,
                          Error *err) {
  size_t len = strlen(text), n;
  int other = bpe_find(t->bpe, text, len);
  if (other >= 0 && other != id)
    return error_set(err, "%s: added token \"%s\" has id %d here and %d in the vocabulary", file,
                     text, id, other);
  const char *bytes = bpe_token(t->bpe, id, &n);
  bool same = other == id || !bytes || (n == len && memcmp(bytes, text, n) == 0);
  for (int i = 0; i < t->n_added && same; i++)
    same = t->added[i].id != id || strcmp(t->added[i].text, text) == 0;
  if (!same)
    return error_set(err, "%s: added token \"%s\": id %d is another token's already", file, text,
                     id);
  return 0;
}

static int add_token(Tokenizer *t, const char *text, json_int_t id, bool special, const char *file,
                     Error *err) {
  size_t len = strlen(text);
  if (len == 0) return error_set(err, "%s: added token %lld is empty", file, (long long)id);
  if (id < 0 || id > BPE_MAX_ID)
    return error_set(err, "%s: added token \"%s\": id %lld; expected 0 to %d", file, text,
                     (long long)id, BPE_MAX_ID);
  if (t->bpe && check_spelling(t, text, (int32_t)id, file, err)) return -1;
  Added *a = tokenizer_add(t, text, len, (int32_t)id, special);
  if (a->id != id)
    return error_set(err, "%s: added token \"%s\" has id %lld here and %d in the vocabulary", file,
                     text, (long long)id, a->id);
  return 0;
}

int tokenizer_check_added(size_t n, const char *file, Error *err) {
  if (n <= MOST_ADDED) return 0;
  return error_set(err, "%s: %zu added tokens; expected at most %d", file, n, MOST_ADDED);
}

int tokenizer_read_added(Tokenizer *t, const json_t *token, json_int_t id, const char *file,
                         Error *err) {
  const char *text = json_is_object(token) ? token_text(token) : NULL;
  if (!text)
    return error_set(err, "%s: added token %lld: expected {\"content\": \"..\", ..}", file,
                     (long long)id);
  bool special, lstrip, rstrip, single_word, normalized;
  if (json_get_bool_or(token, "special", file, false, &special, err) ||
      json_get_bool_or(token, "lstrip", file, false, &lstrip, err) ||
      json_get_bool_or(token, "rstrip", file, false, &rstrip, err) ||
      json_get_bool_or(token, "single_word", file, false, &single_word, err) ||
      json_get_bool_or(token, "normalized", file, false, &normalized, err) ||
      add_token(t, text, id, special, file, err))
    return -1;
  Added *a = tokenizer_add(t, text, strlen(text), (int32_t)id, special);
  a->lstrip = lstrip;
  a->rstrip = rstrip;
  a->single_word = single_word;
  a->normalized = normalized;
  return 0;
}

/* added_tokens_decoder: {"32000": {"content": "<pad>", "special": true, "lstrip": false, ...}} */
static int read_decoder(Tokenizer *t, json_t *decoder, const char *file, Error *err) {
  if (!json_is_object(decoder))
    return error_set(err, "%s: added_tokens_decoder: expected an object", file);
  if (tokenizer_check_added(json_object_size(decoder), file, err)) return -1;
  const char *key;
  json_t *v;
  json_object_foreach(decoder, key, v) {
    char *end;
    long long id = strtoll(key, &end, 10);
    if (*end || end == key || !json_is_object(v))
      return error_set(err, "%s: added_tokens_decoder: \"%s\": expected \"id\": {\"content\": ...}",
                       file, key);
    if (tokenizer_read_added(t, v, id, file, err)) return -1;
  }
  return 0;
}

/* added_tokens.json: {"<pad>": 32000} */
static int read_added_tokens(Tokenizer *t, json_t *map, const char *file, Error *err) {
  if (tokenizer_check_added(json_object_size(map), file, err)) return -1;
  const char *text;
  json_t *id;
  json_object_foreach(map, text, id) {
    if (!json_is_integer(id)) return error_set(err, "%s: \"%s\": expected an id", file, text);
    if (add_token(t, text, json_integer_value(id), false, file, err)) return -1;
  }
  return 0;
}

/* The token that `key` names becomes special; *id is its id (untouched when the key is absent, -1
 * when it is null). A pad token or the like that the vocabulary lacks is of no use to anyone here;
 * `needed` ones must be there. */
static int read_role(Tokenizer *t, const json_t *config, const char *key, bool needed, int *id,
                     const char *file, Error *err) {
  const json_t *v = json_object_get(config, key);
  if (!v) return 0;
  *id = -1;
  if (json_is_null(v)) return 0;
  const char *text = token_text(v);
  if (!text || !*text) return error_set(err, "%s: %s: expected a token's text", file, key);
  *id = tokenizer_find(t, text, strlen(text));
  if (*id >= 0) tokenizer_make_special(t, text, *id);
  if (*id < 0 && needed)
    return error_set(err, "%s: %s: \"%s\" is not in the vocabulary", file, key, text);
  return 0;
}

static int read_roles(Tokenizer *t, const json_t *config, const char *file, Error *err) {
  for (size_t i = 0; i < sizeof role_keys / sizeof *role_keys; i++) {
    int other = -1;
    int *id = i == 0 ? &t->bos : i == 1 ? &t->eos : &other;
    if (read_role(t, config, role_keys[i], i < 2, id, file, err)) return -1;
  }
  const json_t *more = json_object_get(config, "additional_special_tokens");
  if (more && !json_is_null(more) && !json_is_array(more))
    return error_set(err, "%s: additional_special_tokens: expected an array", file);
  for (size_t i = 0; i < json_array_size(more); i++) {
    const char *text = token_text(json_array_get(more, i));
    int id = text && *text ? tokenizer_find(t, text, strlen(text)) : -1;
    if (id < 0)
      return error_set(err, "%s: additional_special_tokens: \"%s\" is not in the vocabulary", file,
                       text ? text : "");
    tokenizer_make_special(t, text, id);
  }
  return 0;
}

/* The post_processor of tokenizer.json decides about BOS where add_bos_token is not given. */
static int use_template(Tokenizer *t, const char *file, Error *err) {
  t->adds_bos = t->template_bos >= 0;
  if (!t->adds_bos || t->bos == t->template_bos) return 0;
  if (t->bos >= 0)
    return error_set(err, "%s: the post_processor puts token %d first, but bos_token is %d", file,
                     t->template_bos, t->bos);
  t->bos = t->template_bos;
  return 0;
}

static int read_switches(Tokenizer *t, const json_t *config, const char *file, Error *err) {
  if (json_get_bool_or(config, "add_bos_token", file, t->adds_bos, &t->adds_bos, err)) return -1;
  if (t->spm && json_get_bool_or(config, "legacy", file, true, &t->prefix_each, err)) return -1;
  bool prefix;
  if (json_get_bool_or(config, "add_prefix_space", file, t->prefix, &prefix, err)) return -1;
  if (t->spm) t->prefix = t->prefix && prefix;
  /* Where other steps come before ByteLevel, transformers does not put the space either. */
  if (t->bpe && pretokenizer_steps(t->words) <= 1) t->prefix = prefix;
  if (t->adds_bos && t->bos < 0)
    return error_set(err, "%s: add_bos_token is true, but there is no bos_token", file);
  return 0;
}

typedef struct ConfigFile {
  char *path;
  json_t *root; /* an object; NULL when the file is absent */
} ConfigFile;

static int config_open(ConfigFile *c, const char *dir, const char *name, Error *err) {
  *c = (ConfigFile){.path = fs_join(dir, name)};
  if (!fs_exists(c->path)) return 0;
  c->root = json_read(c->path, err);
  if (!c->root) return -1;
  return json_is_object(c->root) ? 0 : error_set(err, "%s: expected an object", c->path);
}

static void config_close(ConfigFile *c) {
  json_decref(c->root);
  free(c->path);
}

/* All tokens first, then the roles that name them; where both files name a role, the newer one,
 * tokenizer_config.json, decides. */
static int read_all(Tokenizer *t, const ConfigFile *added, const ConfigFile *map,
                    const ConfigFile *config, Error *err) {
  json_t *decoder = json_object_get(config->root, "added_tokens_decoder");
  if (read_class(t, config->root, config->path, err)) return -1;
  if (added->root && read_added_tokens(t, added->root, added->path, err)) return -1;
  if (decoder && read_decoder(t, decoder, config->path, err)) return -1;
  if (map->root && read_roles(t, map->root, map->path, err)) return -1;
  if (config->root && read_roles(t, config->root, config->path, err)) return -1;
  t->adds_bos = t->bos >= 0;
  if (t->bpe && !json_is_boolean(json_object_get(config->root, "add_bos_token")) &&
      use_template(t, config->path, err))
    return -1;
  return config->root ? read_switches(t, config->root, config->path, err) : 0;
}

int tokenizer_read_config(Tokenizer *t, const char *dir, Error *err) {
  ConfigFile added = {0}, map = {0}, config = {0};
  int rc = config_open(&added, dir, "added_tokens.json", err);
  if (rc == 0) rc = config_open(&map, dir, "special_tokens_map.json", err);
  if (rc == 0) rc = config_open(&config, dir, "tokenizer_config.json", err);
  if (rc == 0) rc = read_all(t, &added, &map, &config, err);
  config_close(&added);
  config_close(&map);
  config_close(&config);
  return rc;
}
