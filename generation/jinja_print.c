/* Values as text: what {{ }} prints (Python's str() and repr()) and the filter tojson (json.dumps
 * without ASCII escapes, as transformers renders templates). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generation/jinja_value.h"

static int put(Render *r, StrBuf *b, const char *text) { return buf_put_text(r, b, text, 0); }

/* ---- numbers ---- */

/* The fewest digits that read back to the same number, as repr() has them: 1.0, 0.0001, 1e-05,
 * 1e+16. */
static void print_float(double f, char out[64]) {
  char digits[40];
  int precision = 0, exponent;
  if (isnan(f) || isinf(f)) {
    snprintf(out, 64, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
    return;
  }
  do snprintf(digits, sizeof digits, "%.*e", precision, f);
  while (strtod(digits, NULL) != f && ++precision < 17);
  exponent = atoi(strchr(digits, 'e') + 1);
  if (exponent < -4 || exponent >= 16) {
    snprintf(out, 64, "%s", digits);
  } else {
    int decimals = precision - exponent;
    snprintf(out, 64, "%.*f", decimals > 1 ? decimals : 1, f);
  }
}

static int put_number(Render *r, StrBuf *b, const Value *v) {
  char text[64];
  if (v->kind == V_FLOAT)
    print_float(v->f, text);
  else
    snprintf(text, sizeof text, "%lld", (long long)v->i);
  return put(r, b, text);
}

/* ---- repr ---- */

static const char *short_escape(char c, const char *letters) {
  static const char *const escapes[] = {"\\n", "\\r", "\\t", "\\b", "\\f"};
  static const char chars[] = "\n\r\t\b\f";
  const char *at = c ? strchr(chars, c) : NULL;
  return at && strchr(letters, escapes[at - chars][1]) ? escapes[at - chars] : NULL;
}

static int repr_str(Render *r, StrBuf *b, const Str *s) {
  bool single = s->len && memchr(s->text, '\'', s->len),
       twice = s->len && memchr(s->text, '"', s->len);
  const char *quote = single && !twice ? "\"" : "'";
  if (s->markup)
    return render_fail(
        r, "printing a list of texts that went through the filter safe is not supported");
  if (put(r, b, quote)) return -1;
  for (size_t i = 0; i < s->len; i++) {
    char c = s->text[i], code[8];
    Str one = str_cut(s, i, 1);
    const char *escape = short_escape(c, "nrt");
    if ((unsigned char)c >= 0x80)
      return render_fail(r, "printing a list or mapping with text beyond ASCII is not supported");
    if (!escape && (c < ' ' || c == 0x7f)) {
      snprintf(code, sizeof code, "\\x%02x", (unsigned)c);
      escape = code;
    }
    if (c == '\\') escape = "\\\\";
    if (c == *quote) escape = c == '"' ? "\\\"" : "\\'";
    if (escape ? buf_put_text(r, b, escape, str_mark(s, i)) : buf_put(r, b, &one)) return -1;
  }
  return put(r, b, quote);
}

static int repr(Render *r, StrBuf *b, const Value *v);

static int repr_list(Render *r, StrBuf *b, const List *l) {
  bool tuple = l->kind == LIST_TUPLE;
  if (l->kind > LIST_TUPLE)
    return render_fail(r, "printing a range or an iterator is not supported");
  if (put(r, b, tuple ? "(" : "[")) return -1;
  for (int i = 0; i < l->n; i++)
    if ((i && put(r, b, ", ")) || repr(r, b, &l->v[i])) return -1;
  return put(r, b, !tuple ? "]" : l->n == 1 ? ",)" : ")");
}

static int repr_dict(Render *r, StrBuf *b, const Dict *d) {
  if (put(r, b, "{")) return -1;
  for (int i = 0; i < d->n; i++)
    if ((i && put(r, b, ", ")) || repr(r, b, &d->pair[i].key) || put(r, b, ": ") ||
        repr(r, b, &d->pair[i].value))
      return -1;
  return put(r, b, "}");
}

static int repr_kind(Render *r, StrBuf *b, const Value *v) {
  switch (v->kind) {
    case V_UNDEFINED:
      return put(r, b, "Undefined");
    case V_NONE:
      return put(r, b, "None");
    case V_BOOL:
      return put(r, b, v->b ? "True" : "False");
    case V_INT:
    case V_FLOAT:
      return put_number(r, b, v);
    case V_STR:
      return repr_str(r, b, &v->s);
    case V_LIST:
      return repr_list(r, b, v->list);
    case V_DICT:
      return repr_dict(r, b, v->dict);
    default:
      return render_fail(r, "printing %s is not supported", value_kind_name(v));
  }
}

static int repr(Render *r, StrBuf *b, const Value *v) {
  if (render_work(r, 1)) return -1;
  if (r->depth >= RENDER_DEPTH) return render_fail(r, "a value is nested too deeply to print");
  r->depth++;
  int rc = repr_kind(r, b, v);
  r->depth--;
  return rc;
}

int value_print(Render *r, const Value *v, Str *out) {
  StrBuf b = {0};
  if (v->kind == V_STR) {
    *out = v->s;
    return 0;
  }
  if (v->kind != V_UNDEFINED && repr(r, &b, v)) return -1;
  *out = buf_str(&b);
  return 0;
}

/* ---- JSON ---- */

typedef struct JsonOut {
  Render *r;
  StrBuf b;
  int indent, level; /* indent < 0: on one line */
} JsonOut;

static int json_value(JsonOut *j, const Value *v);

static int json_str(JsonOut *j, const Str *s) {
  if (put(j->r, &j->b, "\"")) return -1;
  for (size_t i = 0; i < s->len; i++) {
    char c = s->text[i], code[8];
    Str one = str_cut(s, i, 1);
    const char *escape = short_escape(c, "nrtbf");
    if (!escape && (unsigned char)c < ' ') {
      snprintf(code, sizeof code, "\\u%04x", (unsigned)c);
      escape = code;
    }
    if (c == '\\') escape = "\\\\";
    if (c == '"') escape = "\\\"";
    if (escape ? buf_put_text(j->r, &j->b, escape, str_mark(s, i)) : buf_put(j->r, &j->b, &one))
      return -1;
  }
  return put(j->r, &j->b, "\"");
}

static int json_break(JsonOut *j, bool comma) {
  if (comma && put(j->r, &j->b, j->indent < 0 ? ", " : ",")) return -1;
  if (j->indent < 0) return 0;
  if (put(j->r, &j->b, "\n")) return -1;
  for (int i = 0; i < j->indent * j->level; i++)
    if (put(j->r, &j->b, " ")) return -1;
  return 0;
}

static int json_list(JsonOut *j, const List *l) {
  if (l->kind > LIST_TUPLE) return render_fail(j->r, "tojson: not of a range or an iterator");
  if (l->n == 0) return put(j->r, &j->b, "[]");
  if (put(j->r, &j->b, "[")) return -1;
  j->level++;
  for (int i = 0; i < l->n; i++)
    if (json_break(j, i > 0) || json_value(j, &l->v[i])) return -1;
  j->level--;
  return json_break(j, false) || put(j->r, &j->b, "]") ? -1 : 0;
}

static int json_dict(JsonOut *j, const Dict *d) {
  if (d->n == 0) return put(j->r, &j->b, "{}");
  if (put(j->r, &j->b, "{")) return -1;
  j->level++;
  for (int i = 0; i < d->n; i++) {
    const Value *key = &d->pair[i].key;
    if (key->kind != V_STR) return render_fail(j->r, "tojson: only strings can be keys");
    if (json_break(j, i > 0) || json_str(j, &key->s) || put(j->r, &j->b, ": ") ||
        json_value(j, &d->pair[i].value))
      return -1;
  }
  j->level--;
  return json_break(j, false) || put(j->r, &j->b, "}") ? -1 : 0;
}

static int json_kind(JsonOut *j, const Value *v) {
  switch (v->kind) {
    case V_NONE:
      return put(j->r, &j->b, "null");
    case V_BOOL:
      return put(j->r, &j->b, v->b ? "true" : "false");
    case V_FLOAT:
      if (!isfinite(v->f)) return render_fail(j->r, "tojson: a number that JSON cannot hold");
      return put_number(j->r, &j->b, v);
    case V_INT:
      return put_number(j->r, &j->b, v);
    case V_STR:
      return json_str(j, &v->s);
    case V_LIST:
      return json_list(j, v->list);
    case V_DICT:
      return json_dict(j, v->dict);
    default:
      return render_fail(j->r, "tojson: %s cannot be JSON", value_kind_name(v));
  }
}

static int json_value(JsonOut *j, const Value *v) {
  if (render_work(j->r, 1)) return -1;
  if (j->r->depth >= RENDER_DEPTH) return render_fail(j->r, "tojson: a value is nested too deeply");
  j->r->depth++;
  int rc = json_kind(j, v);
  j->r->depth--;
  return rc;
}

int value_to_json(Render *r, const Value *v, int indent, Value *out) {
  JsonOut j = {.r = r, .indent = indent};
  if (json_value(&j, v)) return -1;
  *out = value_of_str(buf_str(&j.b));
  return 0;
}
