/* The lexer. A template is text with tags: {{ print }}, {% statement %}, {# comment #}. What
 * happens to the blanks around them is Jinja's most visible detail:
 * - "-" inside the delimiter takes all blanks on that side;
 * - the newline right behind a statement or comment is dropped (trim_blocks);
 * - blanks between the start of a line and a statement or comment are dropped (lstrip_blocks),
 *   unless the tag says "+". */
#include "generation/jinja_lexer.h"

#include <string.h>

enum { MAX_BRACKETS = 256 };

typedef struct Lexer {
  Slab *slab;
  const char *name;
  Error *err;
  const char *text;
  size_t len, at;
  int line;
  bool line_starts; /* the last tag ended with a newline */
  char closing[MAX_BRACKETS];
  int depth; /* of open brackets */
  Tokens *out;
  int cap;
} Lexer;

static int lex_fail(const Lexer *x, const char *what) {
  return error_set(x->err, "%s: line %d: %s", x->name, x->line, what);
}

static Token *push(Lexer *x, TokenKind kind, size_t from, size_t len) {
  Tokens *t = x->out;
  if (t->n == x->cap) {
    x->cap = x->cap ? 2 * x->cap : 64;
    Token *v = slab_take(x->slab, (size_t)x->cap * sizeof *v);
    if (t->n) memcpy(v, t->v, (size_t)t->n * sizeof *v);
    t->v = v;
  }
  t->v[t->n] = (Token){.kind = kind, .line = x->line, .text = {.text = x->text + from, .len = len}};
  return &t->v[t->n++];
}

/* Moves on, counting lines. */
static void advance(Lexer *x, size_t n) {
  for (size_t i = 0; i < n; i++) x->line += x->text[x->at + i] == '\n';
  x->at += n;
}

static bool looking_at(const Lexer *x, size_t at, const char *what) {
  size_t n = strlen(what);
  return at + n <= x->len && memcmp(x->text + at, what, n) == 0;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_name(char c) {
  return c == '_' || is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Bytes of blanks from here on. */
static size_t spaces(const Lexer *x, size_t at) {
  Str rest = {.text = x->text + at, .len = x->len - at};
  return rest.len - str_strip(&rest, NULL, true, false).len;
}

/* ---- text between tags ---- */

/* Pushes text[from..to), which a tag with this sign follows. strips: the tag is one that loses the
 * blanks before it on its line. */
static void push_data(Lexer *x, size_t from, size_t to, char sign, bool strips) {
  Str data = {.text = x->text + from, .len = to - from};
  if (sign == '-') {
    data = str_strip(&data, NULL, false, true);
  } else if (sign != '+' && strips) {
    const char *newline = data.len ? memrchr(data.text, '\n', data.len) : NULL;
    size_t line = newline ? (size_t)(newline - data.text) + 1 : 0;
    Str last = str_cut(&data, line, data.len - line);
    if ((line > 0 || x->line_starts) && str_strip(&last, NULL, true, false).len == 0)
      data.len = line;
  }
  if (data.len) push(x, T_DATA, from, data.len);
  advance(x, to - from);
}

static char sign_at(const Lexer *x, size_t at) {
  return at < x->len && (x->text[at] == '-' || x->text[at] == '+') ? x->text[at] : 0;
}

/* Behind a closing delimiter: what it takes along. */
static void close_tag(Lexer *x, size_t n, char sign, bool trims) {
  size_t from = x->at;
  advance(x, n);
  if (sign == '-') advance(x, spaces(x, x->at));
  if (!sign && trims && x->at < x->len && x->text[x->at] == '\n') advance(x, 1);
  x->line_starts = x->at > from && x->text[x->at - 1] == '\n';
}

static int lex_comment(Lexer *x, size_t start) {
  const char *end = memmem(x->text + start, x->len - start, "#}", 2);
  if (!end) return lex_fail(x, "the comment is not closed; expected #}");
  size_t at = (size_t)(end - x->text);
  char sign = at > start ? sign_at(x, at - 1) : 0;
  advance(x, at - x->at);
  close_tag(x, 2, sign, true);
  return 0;
}

/* {% raw %} at x->at? Its length up to the end of the tag, the sign before the end in *sign. */
static size_t tag_of(const Lexer *x, size_t at, const char *word, char *opened, char *closed) {
  size_t from = at;
  if (!looking_at(x, at, "{%")) return 0;
  at += 2;
  *opened = sign_at(x, at);
  at += *opened != 0;
  at += spaces(x, at);
  if (!looking_at(x, at, word)) return 0;
  at += strlen(word);
  at += spaces(x, at);
  *closed = sign_at(x, at);
  at += *closed != 0;
  return looking_at(x, at, "%}") ? at + 2 - from : 0;
}

/* Everything up to {% endraw %} is text. */
static int lex_raw(Lexer *x, size_t n, char sign) {
  close_tag(x, n, sign, false);
  char opened = 0, closed = 0;
  size_t end = x->at, tag = 0;
  while (end < x->len && !(tag = tag_of(x, end, "endraw", &opened, &closed))) end++;
  if (!tag) return lex_fail(x, "{% raw %} is not closed; expected {% endraw %}");
  push_data(x, x->at, end, opened, true);
  close_tag(x, tag, closed, true);
  return 0;
}

/* ---- inside of tags ---- */

static int lex_str(Lexer *x) {
  size_t from = x->at + 1, end = from;
  while (end < x->len && x->text[end] != x->text[x->at]) end += x->text[end] == '\\' ? 2 : 1;
  if (end >= x->len) return lex_fail(x, "a string is not closed");
  Token *t = push(x, T_STR, from, end - from);
  const char *wrong = literal_str(x->slab, x->text + from, end - from, &t->text);
  if (wrong) return lex_fail(x, wrong);
  advance(x, end + 1 - x->at);
  return 0;
}

static int lex_number(Lexer *x) {
  bool index = x->at > 0 && x->text[x->at - 1] == '.'; /* a.0.1 has no fraction */
  size_t n;
  Value v;
  const char *wrong = literal_number(x->text + x->at, x->len - x->at, index, &n, &v);
  if (wrong) return lex_fail(x, wrong);
  push(x, T_NUMBER, x->at, n)->value = v;
  advance(x, n);
  return 0;
}

static int lex_operator(Lexer *x) {
  static const char *const twos[] = {"//", "**", "==", "!=", ">=", "<="};
  size_t n = 1;
  char c = x->text[x->at];
  for (size_t i = 0; i < sizeof twos / sizeof *twos; i++)
    if (looking_at(x, x->at, twos[i])) n = 2;
  if (n == 1 && !(c && strchr("+-/*%~[](){}><=.:|,;", c))) {
    char what[64] = "unexpected byte 0x00";
    memcpy(what + strlen("unexpected byte 0x"),
           (char[]){"0123456789ABCDEF"[(unsigned char)c >> 4], "0123456789ABCDEF"[c & 15]}, 2);
    return lex_fail(x, what);
  }
  if (strchr("([{", c)) {
    if (x->depth == MAX_BRACKETS) return lex_fail(x, "brackets are nested too deeply");
    x->closing[x->depth++] = c == '(' ? ')' : c == '[' ? ']' : '}';
  } else if (strchr(")]}", c) && (x->depth == 0 || x->closing[--x->depth] != c)) {
    return lex_fail(x, "a closing bracket does not fit");
  }
  push(x, T_OPERATOR, x->at, n);
  advance(x, n);
  return 0;
}

/* The end of the tag at x->at? Its length, sign included; 0: not here. */
static size_t tag_end(const Lexer *x, bool print, char *sign) {
  *sign = sign_at(x, x->at);
  if (*sign == '+' && print) *sign = 0; /* {{ }} has no +}} */
  size_t n = *sign != 0;
  if (!x->depth && looking_at(x, x->at + n, print ? "}}" : "%}")) return n + 2;
  return 0;
}

static int lex_tag(Lexer *x, bool print) {
  char sign;
  size_t n;
  x->depth = 0;
  while (x->at < x->len) {
    if ((n = tag_end(x, print, &sign))) {
      push(x, print ? T_PRINT_END : T_TAG_END, x->at, n);
      close_tag(x, n, sign, !print);
      return 0;
    }
    char c = x->text[x->at];
    int rc = 0;
    if ((n = spaces(x, x->at))) {
      advance(x, n);
    } else if (is_digit(c)) {
      rc = lex_number(x);
    } else if (is_name(c)) {
      size_t end = x->at;
      while (end < x->len && is_name(x->text[end])) end++;
      push(x, T_NAME, x->at, end - x->at);
      advance(x, end - x->at);
    } else {
      rc = c == '"' || c == '\'' ? lex_str(x) : lex_operator(x);
    }
    if (rc) return -1;
  }
  return lex_fail(x, print ? "{{ is not closed; expected }}" : "{% is not closed; expected %}");
}

/* ---- all of it ---- */

static int lex_next(Lexer *x) {
  size_t open = x->at;
  while (open < x->len && !looking_at(x, open, "{{") && !looking_at(x, open, "{%") &&
         !looking_at(x, open, "{#"))
    open++;
  if (open == x->len) {
    if (open > x->at) push(x, T_DATA, x->at, open - x->at);
    x->at = open;
    return 0;
  }
  bool print = x->text[open + 1] == '{';
  char sign = sign_at(x, open + 2), closed = 0;
  push_data(x, x->at, open, sign, !print);
  size_t raw = tag_of(x, open, "raw", &sign, &closed);
  if (raw && closed != '+') return lex_raw(x, raw, closed);
  size_t start = open + 2 + (sign_at(x, open + 2) != 0);
  if (x->text[open + 1] == '#') return lex_comment(x, start);
  push(x, print ? T_PRINT_BEGIN : T_TAG_BEGIN, open, start - open);
  advance(x, start - x->at);
  return lex_tag(x, print);
}

/* Newlines of all systems become \n; one at the end goes. */
static void take_text(Lexer *x, const char *text, size_t len) {
  char *copy = slab_take(x->slab, len + 1);
  for (size_t i = 0; i < len; i++) {
    if (text[i] == '\r' && i + 1 < len && text[i + 1] == '\n') continue;
    copy[x->len++] = text[i] == '\r' ? '\n' : text[i];
  }
  if (x->len && copy[x->len - 1] == '\n') x->len--;
  x->text = copy;
}

int jinja_lex(Slab *slab, const char *name, const char *text, size_t len, Tokens *out, Error *err) {
  *out = (Tokens){0};
  Lexer x = {.slab = slab, .name = name, .err = err, .line = 1, .line_starts = true, .out = out};
  if (len > TEMPLATE_BYTES)
    return error_set(err, "%s: line 1: %zu bytes; expected at most %d", name, len, TEMPLATE_BYTES);
  take_text(&x, text, len);
  while (x.at < x.len)
    if (lex_next(&x)) return -1;
  push(&x, T_END, x.len, 0);
  return 0;
}
