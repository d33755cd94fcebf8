/* Strings whose bytes carry marks: what is cut out of one, or joined from two, keeps the marks of
 * where it came from. Characters are those of UTF-8, as in Python; a broken byte counts as one. */
#include <string.h>

#include "generation/jinja_value.h"

uint32_t str_mark(const Str *s, size_t i) { return s->marks ? s->marks[i] : s->mark; }

Str str_cut(const Str *s, size_t from, size_t len) {
  Str part = *s;
  part.text += from;
  if (part.marks) part.marks += from;
  part.len = len;
  return part;
}

/* ---- building ---- */

static int buf_room(Render *r, StrBuf *b, size_t more) {
  if (more > RENDER_OUTPUT - b->len) {
    render_fail(r, "the template makes a text of more than %d bytes", RENDER_OUTPUT);
    return -1;
  }
  if (b->text && b->len + more <= b->cap) return 0;
  size_t cap = 2 * (b->len + more) + 64, each = 1 + sizeof *b->marks;
  if (render_room(r, cap * each)) return -1;
  char *text = slab_take(&r->slab, cap);
  uint32_t *marks = slab_take(&r->slab, cap * sizeof *marks);
  if (b->len) {
    memcpy(text, b->text, b->len);
    memcpy(marks, b->marks, b->len * sizeof *marks);
  }
  *b = (StrBuf){text, marks, b->len, cap};
  return 0;
}

int buf_put(Render *r, StrBuf *b, const Str *s) {
  if (s->len == 0) return 0;
  if (buf_room(r, b, s->len) || render_work(r, s->len / 16)) return -1;
  memcpy(b->text + b->len, s->text, s->len);
  for (size_t i = 0; i < s->len; i++) b->marks[b->len + i] = str_mark(s, i);
  b->len += s->len;
  return 0;
}

int buf_put_text(Render *r, StrBuf *b, const char *text, uint32_t mark) {
  Str s = str_of(text);
  s.mark = mark;
  return buf_put(r, b, &s);
}

Str buf_str(const StrBuf *b) {
  return b->len ? (Str){.text = b->text, .marks = b->marks, .len = b->len} : str_of("");
}

/* Jinja escapes for HTML what is joined to a text that went through the filter safe. */
static bool is_escaped(const Str *s) {
  for (size_t i = 0; i < s->len; i++)
    if (s->text[i] && strchr("&<>'\"", s->text[i])) return true;
  return false;
}

int str_join(Render *r, const Str *a, const Str *b, Value *out) {
  StrBuf buf = {0};
  if (a->markup != b->markup && is_escaped(a->markup ? b : a))
    return render_fail(r,
                       "joining HTML to a text that went through the filter safe is not "
                       "supported");
  if (buf_put(r, &buf, a) || buf_put(r, &buf, b)) return -1;
  *out = value_of_str(buf_str(&buf));
  out->s.markup = a->markup || b->markup;
  return 0;
}

/* ---- characters ---- */

size_t utf8_step(const char *s, size_t len) {
  unsigned char c = (unsigned char)*s;
  size_t want = c >= 0xf0 && c < 0xf5 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
  if (c >= 0xf5 || want > len) return 1;
  for (size_t i = 1; i < want; i++)
    if (((unsigned char)s[i] & 0xc0) != 0x80) return 1;
  return want;
}

size_t str_count(const Str *s) {
  size_t n = 0;
  for (size_t at = 0; at < s->len; n++) at += utf8_step(s->text + at, s->len - at);
  return n;
}

/* Bytes of the last character. */
static size_t last_step(const Str *s) {
  for (size_t n = 2; n <= 4 && n <= s->len; n++)
    if (utf8_step(s->text + s->len - n, n) == n) return n;
  return 1;
}

static uint32_t code_point(const char *s, size_t n) {
  static const unsigned char lead[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t c = (unsigned char)s[0] & lead[n];
  for (size_t i = 1; i < n; i++) c = c << 6 | ((unsigned char)s[i] & 0x3f);
  return c;
}

/* What str.isspace() of Python says. */
static bool is_blank(const char *s, size_t n) {
  if (n == 1 && (unsigned char)*s >= 0x80) return false;
  uint32_t c = code_point(s, n);
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

static bool has_char(const Str *chars, const char *c, size_t n) {
  for (size_t at = 0, step; at < chars->len; at += step) {
    step = utf8_step(chars->text + at, chars->len - at);
    if (step == n && memcmp(chars->text + at, c, n) == 0) return true;
  }
  return false;
}

static bool strips(const Str *chars, const char *c, size_t n) {
  return chars ? has_char(chars, c, n) : is_blank(c, n);
}

Str str_strip(const Str *s, const Str *chars, bool left, bool right) {
  Str part = *s;
  while (left && part.len > 0) {
    size_t step = utf8_step(part.text, part.len);
    if (!strips(chars, part.text, step)) break;
    part = str_cut(&part, step, part.len - step);
  }
  while (right && part.len > 0) {
    size_t step = last_step(&part);
    if (!strips(chars, part.text + part.len - step, step)) break;
    part.len -= step;
  }
  return part;
}

/* ---- searching ---- */

size_t str_find(const Str *s, const Str *needle, size_t from) {
  if (from > s->len) return s->len + 1;
  if (needle->len == 0) return from;
  const char *at = memmem(s->text + from, s->len - from, needle->text, needle->len);
  return at ? (size_t)(at - s->text) : s->len + 1;
}

int str_replace(Render *r, const Str *s, const Str *old, const Str *by, int64_t most, Value *out) {
  StrBuf buf = {0};
  size_t at = 0, last = 0;
  if (render_work(r, s->len / 16)) return -1;
  for (int64_t n = 0; (most < 0 || n < most) && (at = str_find(s, old, at)) <= s->len; n++) {
    Str before = str_cut(s, last, at - last);
    if (buf_put(r, &buf, &before) || buf_put(r, &buf, by) || render_work(r, 1)) return -1;
    last = at + old->len;
    /* An empty text is found before every character and at the end. */
    if (old->len) {
      at = last;
    } else {
      at += at < s->len ? utf8_step(s->text + at, s->len - at) : 1;
    }
  }
  Str rest = str_cut(s, last, s->len - last);
  if (buf_put(r, &buf, &rest)) return -1;
  *out = value_of_str(buf_str(&buf));
  return 0;
}

/* ---- splitting ---- */

typedef struct Parts {
  Str *v;
  size_t n, cap;
} Parts;

static int part_add(Render *r, Parts *p, Str s) {
  if (p->n == p->cap) {
    size_t cap = p->cap ? 2 * p->cap : 8;
    if (render_room(r, cap * sizeof s)) return -1;
    Str *v = slab_take(&r->slab, cap * sizeof s);
    if (p->n) memcpy(v, p->v, p->n * sizeof s);
    *p = (Parts){v, p->n, cap};
  }
  p->v[p->n++] = s;
  return render_work(r, 1);
}

/* Takes the next part off *rest, from its start or its end. */
static Str take_word(Str *rest, bool from_right) {
  size_t n = 0, step;
  while (n < rest->len) {
    Str left = str_cut(rest, from_right ? 0 : n, rest->len - n);
    step = from_right ? last_step(&left) : utf8_step(left.text, left.len);
    if (is_blank(from_right ? left.text + left.len - step : left.text, step)) break;
    n += step;
  }
  Str word = str_cut(rest, from_right ? rest->len - n : 0, n);
  *rest = str_cut(rest, from_right ? 0 : n, rest->len - n);
  *rest = str_strip(rest, NULL, !from_right, from_right);
  return word;
}

static int split_words(Render *r, const Str *s, int64_t most, bool from_right, Parts *p) {
  Str rest = str_strip(s, NULL, !from_right, from_right);
  for (int64_t n = 0; rest.len > 0; n++) {
    if (most >= 0 && n >= most) return part_add(r, p, rest);
    if (part_add(r, p, take_word(&rest, from_right))) return -1;
  }
  return 0;
}

static int split_by(Render *r, const Str *s, const Str *by, int64_t most, Parts *p) {
  size_t at = 0, found;
  for (int64_t n = 0; (most < 0 || n < most) && (found = str_find(s, by, at)) <= s->len; n++) {
    if (part_add(r, p, str_cut(s, at, found - at))) return -1;
    at = found + by->len;
  }
  return part_add(r, p, str_cut(s, at, s->len - at));
}

static int split_by_right(Render *r, const Str *s, const Str *by, int64_t most, Parts *p) {
  size_t end = s->len, at = end;
  for (int64_t n = 0; (most < 0 || n < most) && at >= by->len;) {
    at -= by->len;
    if (memcmp(s->text + at, by->text, by->len) != 0) {
      at += by->len - 1;
      continue;
    }
    if (part_add(r, p, str_cut(s, at + by->len, end - at - by->len))) return -1;
    end = at;
    n++;
  }
  return part_add(r, p, str_cut(s, 0, end));
}

int str_split(Render *r, const Str *s, const Str *by, int64_t most, bool from_right, Value *out) {
  Parts p = {0};
  if (by && by->len == 0) return render_fail(r, "split: the separator is empty");
  if (render_work(r, s->len / 16)) return -1;
  int rc = !by          ? split_words(r, s, most, from_right, &p)
           : from_right ? split_by_right(r, s, by, most, &p)
                        : split_by(r, s, by, most, &p);
  List *l = rc ? NULL : list_new(r, LIST_PLAIN, (int64_t)p.n);
  if (!l) return -1;
  for (size_t i = 0; i < p.n; i++) l->v[from_right ? p.n - 1 - i : i] = value_of_str(p.v[i]);
  *out = value_of_list(l);
  return 0;
}

/* ---- upper and lower case ---- */

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static char upper(char c) { return c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c; }
static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c; }

/* Does a word begin behind c? For the filter title words begin behind these, for the method behind
 * everything that is no letter. */
static bool opens_word(char c, StrCase how) {
  if (how == CASE_TITLE) return !is_letter(c);
  return (c && strchr("-({[<", c)) || (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
}

int str_case(Render *r, const Str *s, StrCase how, Value *out) {
  if (render_room(r, s->len) || render_work(r, s->len / 16)) return -1;
  char *text = slab_take(&r->slab, s->len);
  bool first = true;
  for (size_t i = 0; i < s->len; i++) {
    char c = s->text[i];
    if ((unsigned char)c >= 0x80)
      return render_fail(r, "upper and lower case are only supported for ASCII, found byte 0x%02X",
                         (unsigned char)c);
    bool up = how == CASE_UPPER || (how != CASE_LOWER && first);
    text[i] = up ? upper(c) : lower(c);
    first = how != CASE_CAPITAL && opens_word(c, how);
  }
  *out = value_of_str(*s);
  out->s.text = text;
  return 0;
}
