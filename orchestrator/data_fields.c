/* Fields of a record: looked up with errors that name the place, and read as turns of a dialogue.
 */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "orchestrator/data.h"

void dialogue_push(Dialogue *d, Speaker by, const char *text, size_t len) {
  d->turns = mem_grow(d->turns, (size_t)d->n + 1, sizeof *d->turns);
  char *copy = mem_alloc(len + 1, 1);
  memcpy(copy, text, len);
  copy[len] = '\0';
  d->turns[d->n++] = (Turn){by, copy, len};
}

void dialogue_drop_last(Dialogue *d) {
  require(d->n > 0);
  free(d->turns[--d->n].text);
}

void dialogue_free(Dialogue *d) {
  while (d->n > 0) dialogue_drop_last(d);
  free(d->turns);
  *d = (Dialogue){NULL, 0};
}

json_t *field_find(const Record *r, const char *name) {
  json_t *v = name[0] ? json_object_get(r->json, name) : NULL;
  return json_is_null(v) ? NULL : v;
}

int field_missing(const Record *r, const char *names, Error *err) {
  char has[512] = "";
  const char *key;
  json_t *v;
  json_object_foreach(r->json, key, v) {
    size_t used = strlen(has);
    snprintf(has + used, sizeof has - used, "%s%s%s", used ? ", " : "", key,
             json_is_null(v) ? " (null)" : "");
  }
  return error_set(err, "%s: no field %s; the record has: %s", r->place, names,
                   has[0] ? has : "nothing");
}

json_t *field_need(const Record *r, const char *name, Error *err) {
  json_t *v = field_find(r, name);
  if (v) return v;
  char *quoted = mem_printf("\"%s\"", name);
  field_missing(r, quoted, err);
  free(quoted);
  return NULL;
}

int field_wrong(const Record *r, const char *name, const json_t *v, const char *expected,
                Error *err) {
  return error_set(err, "%s: field \"%s\" is %s; expected %s", r->place, name, json_type_name(v),
                   expected);
}

/* One message and where it stands, for errors: field "messages", message 3. */
typedef struct Message {
  const Record *record;
  const char *field;
  size_t number;
  const json_t *json;
} Message;

static int message_wrong(const Message *m, const char *found, const char *expected, Error *err) {
  return error_set(err, "%s: field \"%s\", message %zu: %s; expected %s", m->record->place,
                   m->field, m->number, found, expected);
}

static int read_speaker(const Message *m, Speaker *by, Error *err) {
  static const struct {
    const char *name;
    Speaker by;
  } names[] = {{"system", BY_SYSTEM}, {"user", BY_USER},           {"human", BY_USER},
               {"prompter", BY_USER}, {"assistant", BY_ASSISTANT}, {"gpt", BY_ASSISTANT},
               {"bot", BY_ASSISTANT}, {"chatgpt", BY_ASSISTANT},   {"model", BY_ASSISTANT}};
  const json_t *role = json_object_get(m->json, "role");
  if (!role) role = json_object_get(m->json, "from");
  if (!json_is_string(role)) return message_wrong(m, "no role", "\"role\" or \"from\"", err);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    *by = names[i].by;
    if (!strcasecmp(json_string_value(role), names[i].name)) return 0;
  }
  char found[80];
  snprintf(found, sizeof found, "role \"%.40s\"", json_string_value(role));
  return message_wrong(m, found, "system, user (human) or assistant (gpt, bot, model)", err);
}

static int put_part(const Message *m, const json_t *part, Marked *out, Error *err) {
  const json_t *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
  if (!text) text = json_object_get(part, "value");
  bool is_text = !type || (json_is_string(type) && !strcmp(json_string_value(type), "text"));
  if (!is_text || !json_is_string(text))
    return message_wrong(m, "content with a part that is no text", "{type: text, text: ...}", err);
  marked_put(out, json_string_value(text), json_string_length(text), true);
  return 0;
}

static int read_content(const Message *m, Marked *out, Error *err) {
  const json_t *content = json_object_get(m->json, "content"), *part;
  if (!content) content = json_object_get(m->json, "value");
  if (json_is_string(content)) {
    marked_put(out, json_string_value(content), json_string_length(content), true);
    return 0;
  }
  if (!json_is_array(content))
    return message_wrong(m, "no content", "\"content\" or \"value\": a text or a list of parts",
                         err);
  size_t i;
  json_array_foreach(content, i, part) {
    if (put_part(m, part, out, err)) return -1;
  }
  return 0;
}

static int push_message(const Message *m, Dialogue *out, Error *err) {
  Speaker by = BY_USER;
  Marked text = {0};
  if (!json_is_object(m->json))
    return message_wrong(m, json_type_name(m->json), "an object with role and content", err);
  if (read_speaker(m, &by, err)) return -1;
  int bad = read_content(m, &text, err);
  if (!bad) dialogue_push(out, by, text.text ? text.text : "", text.len);
  marked_free(&text);
  return bad;
}

int field_turns(const Record *r, const char *name, const json_t *v, Speaker by, Dialogue *out,
                Error *err) {
  if (json_is_string(v)) {
    dialogue_push(out, by, json_string_value(v), json_string_length(v));
    return 0;
  }
  if (json_is_object(v)) return push_message(&(Message){r, name, 1, v}, out, err);
  if (!json_is_array(v))
    return field_wrong(r, name, v, "a text, a message or a list of messages", err);
  size_t i;
  const json_t *item;
  json_array_foreach(v, i, item) {
    if (push_message(&(Message){r, name, i + 1, item}, out, err)) return -1;
  }
  return 0;
}
