/* Variables of a template from JSON. */
#ifndef JINJA_TEST_H
#define JINJA_TEST_H

#include "core/json.h"
#include "generation/jinja.h"

static inline Value jinja_of_json(Render *r, const json_t *j);

static inline Value jinja_of_object(Render *r, const json_t *j) {
  Dict *d = dict_new(r);
  const char *key;
  json_t *v;
  json_object_foreach((json_t *)j, key, v) {
    if (dict_put(r, d, value_of_str(str_of(key)), jinja_of_json(r, v))) die("no room");
  }
  return (Value){.kind = V_DICT, .dict = d};
}

static inline Value jinja_of_json(Render *r, const json_t *j) {
  List *l;
  switch (json_typeof(j)) {
    case JSON_NULL:
      return value_none();
    case JSON_TRUE:
    case JSON_FALSE:
      return value_of_bool(json_is_true(j));
    case JSON_INTEGER:
      return value_of_int(json_integer_value(j));
    case JSON_REAL:
      return value_of_float(json_real_value(j));
    case JSON_STRING:
      return value_of_str((Str){.text = json_string_value(j), .len = json_string_length(j)});
    case JSON_OBJECT:
      return jinja_of_object(r, j);
    case JSON_ARRAY:
      break;
  }
  l = list_new(r, LIST_PLAIN, (int64_t)json_array_size(j));
  if (!l) die("no room");
  for (int i = 0; i < l->n; i++) l->v[i] = jinja_of_json(r, json_array_get(j, (size_t)i));
  return value_of_list(l);
}

#endif
