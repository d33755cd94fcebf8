/* JSON reading: parsing with places in errors, and typed access to the members of an object. */
#include "core/json.h"

#include <stdlib.h>
#include <string.h>

#include "core/fs.h"

/* True when the string that ends before `s` is the name of a member. */
static bool is_name(const char *s, const char *end) {
  while (s < end && (*s == ' ' || *s == '\t' || *s == '\n' || *s == '\r')) s++;
  return s < end && *s == ':';
}

/* A copy of the text in which \u0000 reads \uFFFD in the names of members. */
static char *mend_names(const char *text, size_t len) {
  char *copy = strndup(text, len), *end = copy + len;
  if (!copy) die("out of memory: %zu bytes", len);
  for (char *c = copy; c < end; c++) {
    if (*c != '"') continue;
    char *start = ++c;
    while (c < end && *c != '"') c += *c == '\\' && c + 1 < end ? 2 : 1;
    if (!is_name(c + 1, end)) continue;
    for (char *k = start; k + 6 <= c; k += *k == '\\' ? 2 : 1)
      if (!memcmp(k, "\\u0000", 6)) {
        memset(k + 2, 'F', 3);
        k[5] = 'D';
      }
  }
  return copy;
}

static json_t *load(const char *text, size_t len, size_t flags, json_error_t *e) {
  flags |= JSON_DECODE_ANY | JSON_ALLOW_NUL;
  json_t *v = json_loadb(text, len, flags, e);
  if (v || json_error_code(e) != json_error_null_byte_in_key) return v;
  char *mended = mend_names(text, len);
  v = json_loadb(mended, len, flags, e);
  free(mended);
  return v;
}

/* Jansson passes over a NUL byte behind a number, so that it is looked for here. */
static bool has_nul(const char *text, size_t len, const char *name, int64_t line, Error *err) {
  const char *nul = memchr(text, '\0', len), *start = text;
  if (!nul) return false;
  for (const char *c = text; c < nul; c++) {
    if (*c != '\n') continue;
    line++;
    start = c + 1;
  }
  error_set(err, "%s:%lld:%td: not valid JSON: a NUL byte", name, (long long)line, nul - start + 1);
  return true;
}

static json_t *parse(const char *text, size_t len, const char *name, int64_t line, size_t flags,
                     Error *err) {
  if (len >= 3 && !memcmp(text, "\xEF\xBB\xBF", 3)) { /* a byte order mark: RFC 8259, section 8.1 */
    text += 3;
    len -= 3;
  }
  if (has_nul(text, len, name, line, err)) return NULL;
  json_error_t e;
  json_t *v = load(text, len, flags, &e);
  if (v) return v;
  if (e.line > 0) line += e.line - 1;
  error_set(err, "%s:%lld:%d: not valid JSON: %s", name, (long long)line,
            e.column > 0 ? e.column : 1, e.text);
  return NULL;
}

json_t *json_parse(const char *text, size_t len, const char *name, Error *err) {
  return parse(text, len, name, 1, 0, err);
}

json_t *json_parse_unique(const char *text, size_t len, const char *name, Error *err) {
  return parse(text, len, name, 1, JSON_REJECT_DUPLICATES, err);
}

json_t *json_parse_at(const char *text, size_t len, const char *name, int64_t line, Error *err) {
  return parse(text, len, name, line, 0, err);
}

json_t *json_read(const char *path, Error *err) {
  size_t len;
  char *text = fs_read(path, &len, err);
  if (!text) return NULL;
  json_t *v = json_parse(text, len, path, err);
  free(text);
  return v;
}

const char *json_type_name(const json_t *v) {
  if (!v) return "nothing";
  switch (json_typeof(v)) {
    case JSON_OBJECT:
      return "an object";
    case JSON_ARRAY:
      return "an array";
    case JSON_STRING:
      return "a string";
    case JSON_INTEGER:
      return "an integer";
    case JSON_REAL:
      return "a number with a fraction or exponent";
    case JSON_TRUE:
    case JSON_FALSE:
      return "a boolean";
    case JSON_NULL:
      return "null";
  }
  return "nothing";
}

static int wrong_type(const json_t *v, const char *key, const char *file, const char *expected,
                      Error *err) {
  return error_set(err, "%s: \"%s\" is %s; expected %s", file, key, json_type_name(v), expected);
}

/* 1: *v is the member; 0: absent or null; -1: obj is no object. */
static int member(const json_t *obj, const char *key, const char *file, const json_t **v,
                  Error *err) {
  if (!json_is_object(obj))
    return error_set(err, "%s: found %s; expected an object with \"%s\"", file, json_type_name(obj),
                     key);
  *v = json_object_get(obj, key);
  return *v && !json_is_null(*v);
}

static int integer_in(const json_t *v, const char *key, const char *file, int64_t lo, int64_t hi,
                      int64_t *out, Error *err) {
  if (!json_is_integer(v)) return wrong_type(v, key, file, "an integer", err);
  int64_t x = json_integer_value(v);
  if (x < lo || x > hi)
    return error_set(err, "%s: \"%s\" is %lld; expected %lld to %lld", file, key, (long long)x,
                     (long long)lo, (long long)hi);
  *out = x;
  return 0;
}

int json_get_i64(const json_t *obj, const char *key, const char *file, int64_t lo, int64_t hi,
                 int64_t *out, Error *err) {
  const json_t *v = NULL;
  int there = member(obj, key, file, &v, err);
  if (there < 0) return -1;
  if (!there) return error_set(err, "%s: \"%s\" is missing; expected an integer", file, key);
  return integer_in(v, key, file, lo, hi, out, err);
}

int json_get_i64_or(const json_t *obj, const char *key, const char *file, int64_t lo, int64_t hi,
                    int64_t dflt, int64_t *out, Error *err) {
  const json_t *v = NULL;
  int there = member(obj, key, file, &v, err);
  if (there < 0) return -1;
  if (there) return integer_in(v, key, file, lo, hi, out, err);
  *out = dflt;
  return 0;
}

int json_get_f64_or(const json_t *obj, const char *key, const char *file, double dflt, double *out,
                    Error *err) {
  const json_t *v = NULL;
  int there = member(obj, key, file, &v, err);
  if (there < 0) return -1;
  if (there && !json_is_number(v)) return wrong_type(v, key, file, "a number", err);
  *out = there ? json_number_value(v) : dflt;
  return 0;
}

int json_get_bool_or(const json_t *obj, const char *key, const char *file, bool dflt, bool *out,
                     Error *err) {
  const json_t *v = NULL;
  int there = member(obj, key, file, &v, err);
  if (there < 0) return -1;
  if (there && !json_is_boolean(v)) return wrong_type(v, key, file, "true or false", err);
  *out = there ? json_is_true(v) : dflt;
  return 0;
}

int json_get_str_or(const json_t *obj, const char *key, const char *file, const char *dflt,
                    const char **out, Error *err) {
  const json_t *v = NULL;
  int there = member(obj, key, file, &v, err);
  if (there < 0) return -1;
  if (there && !json_is_string(v)) return wrong_type(v, key, file, "a string", err);
  *out = there ? json_string_value(v) : dflt;
  return 0;
}
