/* Where a chat template comes from, and the special tokens that it may name. */
#include "generation/chat.h"

#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/json.h"
#include "generation/chat_internal.h"

/* ---- special tokens ---- */

static const char *spelled(const Tokenizer *t, int id) {
  for (int i = 0; id >= 0 && i < t->n_added; i++)
    if (t->added[i].id == id) return t->added[i].text;
  return NULL;
}

size_t chat_special_at(const Tokenizer *t, const char *text, size_t len) {
  size_t longest = 0;
  for (int i = 0; i < t->n_added; i++) {
    const Added *a = &t->added[i];
    bool here = a->special && a->len > longest && a->len <= len;
    if (here && memcmp(a->text, text, a->len) == 0) longest = a->len;
  }
  return longest;
}

int chat_special_end(const Tokenizer *t, const ChatText *text) {
  const Added *last = NULL;
  for (int i = 0; i < t->n_added; i++) {
    const Added *a = &t->added[i];
    if (!a->special || a->len > text->len || (last && a->len < last->len)) continue;
    size_t from = text->len - a->len;
    bool here = memcmp(a->text, text->text + from, a->len) == 0;
    if (here && !memchr(text->content + from, 1, a->len)) last = a;
  }
  return last ? last->id : -1;
}

/* ---- opening ---- */

Chat *chat_parse(const char *place, const char *text, size_t len, const Tokenizer *t, Error *err) {
  JinjaTemplate *template = jinja_compile(place, text, len, err);
  if (!template) return NULL;
  Chat *c = mem_zalloc(1, sizeof *c);
  *c = (Chat){.template = template, .tokenizer = t, .roles = json_object()};
  const char *bos = spelled(t, t->bos), *eos = spelled(t, t->eos);
  if (bos) json_object_set_new(c->roles, "bos_token", json_string(bos));
  if (eos) json_object_set_new(c->roles, "eos_token", json_string(eos));
  return c;
}

void chat_free(Chat *c) {
  if (!c) return;
  jinja_free(c->template);
  json_decref(c->roles);
  free(c);
}

/* ---- built-in formats ---- */

static Chat *open_format(const ChatFormat *f, const Tokenizer *t, Error *err) {
  for (const char *const *token = f->tokens; *token; token++) {
    size_t len = strlen(*token);
    if (chat_special_at(t, *token, len) == len) continue;
    error_set(err, "the chat format %s needs the special token %s, which the tokenizer lacks",
              f->name, *token);
    return NULL;
  }
  if (f->roles && (!spelled(t, t->bos) || !spelled(t, t->eos))) {
    error_set(err, "the chat format %s needs a %s token, which the tokenizer lacks", f->name,
              spelled(t, t->bos) ? "EOS" : "BOS");
    return NULL;
  }
  char *place = mem_printf("chat format %s", f->name);
  Chat *c = chat_parse(place, f->text, strlen(f->text), t, err);
  free(place);
  return c;
}

/* ---- the checkpoint's own ---- */

/* A string, or a list of {name, template}, of which "default" is taken. */
static const json_t *default_template(const json_t *v) {
  size_t i;
  const json_t *item;
  if (!json_is_array(v)) return v;
  json_array_foreach(v, i, item) {
    const json_t *name = json_object_get(item, "name");
    if (json_is_string(name) && strcmp(json_string_value(name), "default") == 0)
      return json_object_get(item, "template");
  }
  return NULL;
}

/* The other tokens with a role, as strings or {content}. */
static void read_roles(Chat *c, const json_t *config) {
  static const char *const keys[] = {"unk_token", "pad_token", "sep_token", "cls_token",
                                     "mask_token"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    json_t *v = json_object_get(config, keys[i]);
    if (json_is_object(v)) v = json_object_get(v, "content");
    if (json_is_string(v)) json_object_set(c->roles, keys[i], v);
  }
}

static Chat *open_config(const char *path, const Tokenizer *t, Error *err) {
  json_t *config = json_read(path, err);
  if (!config) return NULL;
  const json_t *given = json_object_get(config, "chat_template"), *v = default_template(given);
  Chat *c = NULL;
  if (!given || json_is_null(given)) {
    error_set(err, "%s: no chat_template", path);
  } else if (!json_is_string(v)) {
    error_set(err,
              "%s: chat_template is %s; expected a template, or a list with one named \"default\"",
              path, json_type_name(given));
  } else {
    c = chat_parse("chat_template", json_string_value(v), json_string_length(v), t, err);
    if (c)
      read_roles(c, config);
    else
      error_prefix(err, "%s", path);
  }
  json_decref(config);
  return c;
}

static Chat *open_file(const char *path, const char *config_path, const Tokenizer *t, Error *err) {
  size_t len;
  char *text = fs_read(path, &len, err);
  Chat *c = text ? chat_parse(path, text, len, t, err) : NULL;
  free(text);
  json_t *config = c && fs_exists(config_path) ? json_read(config_path, err) : NULL;
  if (config) read_roles(c, config);
  json_decref(config);
  return c;
}

static Chat *open_own(const char *dir, const Tokenizer *t, Error *err) {
  char *file = fs_join(dir, "chat_template.jinja"), *config = fs_join(dir, "tokenizer_config.json");
  Chat *c = NULL;
  if (fs_exists(file))
    c = open_file(file, config, t, err);
  else if (fs_exists(config))
    c = open_config(config, t, err);
  else
    error_set(err,
              "%s: no chat template; expected tokenizer_config.json with a chat_template, or "
              "chat_template.jinja",
              dir);
  free(file);
  free(config);
  return c;
}

Chat *chat_open(const char *name, const char *dir, const Tokenizer *t, Error *err) {
  const ChatFormat *f = chat_format(name);
  if (f) return open_format(f, t, err);
  if (strcmp(name, "auto") == 0) return open_own(dir, t, err);
  error_set(err, "no chat format \"%s\"", name);
  return NULL;
}
