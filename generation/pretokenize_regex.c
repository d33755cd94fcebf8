/* Patterns of tokenizer.json are read by Oniguruma, in Ruby's syntax. PCRE2 reads most of it alike;
 * what it would read otherwise is spelled out (\s: PCRE2 takes U+180E for a space) or refused (\w,
 * \b, \h, anchors, nested classes, `&&`, scripts, {n}+), never passed on as it is. */
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generation/pretokenize.h"

/* White_Space, and all the rest, as members of a class. */
static const char spaces[] =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
static const char no_spaces[] =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-"
    "\\x{10ffff}";

typedef struct Reader {
  const char *pattern, *at, *end;
  FILE *out;
  Error *err;
} Reader;

static int refuse(const Reader *r, const char *from, size_t n) {
  if (n > (size_t)(r->end - from)) n = (size_t)(r->end - from);
  if (n > PATTERN_SHOWN) n = PATTERN_SHOWN;
  ptrdiff_t len = r->end - r->pattern;
  return error_set(r->err, "pattern \"%.*s\": \"%.*s\" at byte %td is not supported",
                   len < PATTERN_SHOWN ? (int)len : PATTERN_SHOWN, r->pattern, (int)n, from,
                   from - r->pattern);
}

static bool next_is(const Reader *r, const char *text) {
  size_t n = strlen(text);
  return (size_t)(r->end - r->at) >= n && memcmp(r->at, text, n) == 0;
}

static void copy(Reader *r, size_t n) {
  fwrite(r->at, 1, n, r->out);
  r->at += n;
}

/* \p{L}, \P{Lu}, \p{^N}: general categories. */
static int property(Reader *r) {
  const char *c = r->at + 2;
  if (c < r->end && *c == '{') c++;
  if (c < r->end && *c == '^') c++;
  size_t n = 0;
  while (c + n < r->end && isalpha((unsigned char)c[n])) n++;
  bool named = (n == 1 || n == 2) && strchr("CLMNPSZ", *c) && (n == 1 || islower(c[1]));
  if (!named || r->at[2] != '{' || c + n == r->end || c[n] != '}')
    return refuse(r, r->at, (size_t)(c - r->at) + n + 1);
  copy(r, (size_t)(c - r->at) + n + 1);
  return 0;
}

/* \x41, \x{1F600}, \u0041 */
static int code_point(Reader *r) {
  const char *c = r->at + 2;
  bool braces = r->at[1] == 'x' && c < r->end && *c == '{';
  if (braces) c++;
  size_t n = 0, want = r->at[1] == 'u' ? 4 : 2;
  while (c + n < r->end && n < (braces ? 6 : want) && isxdigit((unsigned char)c[n])) n++;
  if (braces ? n == 0 || c + n == r->end || c[n] != '}' : n != want)
    return refuse(r, r->at, (size_t)(c - r->at) + n);
  fprintf(r->out, "\\x{%.*s}", (int)n, c);
  r->at = c + n + braces;
  return 0;
}

static int escape(Reader *r, bool in_class) {
  if (r->end - r->at < 2) return refuse(r, r->at, 1);
  unsigned char c = (unsigned char)r->at[1];
  switch (c) {
    case 's':
    case 'S':
      fprintf(r->out, in_class ? "%s" : "[%s]", c == 's' ? spaces : no_spaces);
      r->at += 2;
      /* What follows must not become the end of a range that starts in there. */
      return in_class && next_is(r, "-") && !next_is(r, "-]") ? refuse(r, r->at - 2, 4) : 0;
    case 'p':
    case 'P':
      return property(r);
    case 'x':
    case 'u':
      return code_point(r);
    case 'd':
    case 'D':
    case 'r':
    case 'n':
    case 't':
    case 'f':
      break;
    default:
      if (c >= 0x80 || isalnum(c) || c < ' ') return refuse(r, r->at, 2);
  }
  copy(r, 2);
  return 0;
}

static int class(Reader *r) {
  const char *from = r->at;
  copy(r, next_is(r, "[^") ? 2 : 1);
  if (next_is(r, "]")) return refuse(r, from, 3);
  while (r->at < r->end && *r->at != ']') {
    if (*r->at == '[') return refuse(r, r->at, 2);
    if (next_is(r, "&&")) return refuse(r, r->at, 2);
    if (next_is(r, "-\\s") || next_is(r, "-\\S")) return refuse(r, r->at, 3);
    if (*r->at == '\\') {
      if (escape(r, true)) return -1;
    } else {
      copy(r, 1);
    }
  }
  if (r->at == r->end) return refuse(r, from, SIZE_MAX);
  copy(r, 1);
  return 0;
}

static int group(Reader *r) {
  static const char *const heads[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"};
  for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
    if (!next_is(r, heads[i])) continue;
    copy(r, strlen(heads[i]));
    return 0;
  }
  /* Where it is not the first thing of all, Ruby's (?i) takes the alternatives that follow along.
   */
  if (next_is(r, "(?i)") && r->at == r->pattern) {
    copy(r, strlen("(?i)"));
    return 0;
  }
  if (next_is(r, "(?") || next_is(r, "(*")) return refuse(r, r->at, 4);
  copy(r, 1);
  return 0;
}

/* {2}, {2,}, {2,3}, {2,3}?; in Ruby {2}? means (?:..{2})? and {2}+ means (?:..{2})+. */
static int counts(Reader *r) {
  const char *c = r->at + 1;
  while (c < r->end && isdigit((unsigned char)*c)) c++;
  bool two = c<r->end && * c == ',', sound = c> r->at + 1;
  if (two) c++;
  while (c < r->end && two && isdigit((unsigned char)*c)) c++;
  if (!sound || c == r->end || *c != '}') return refuse(r, r->at, 1);
  c++;
  if (c < r->end && (*c == '+' || (*c == '?' && !two)))
    return refuse(r, r->at, (size_t)(c - r->at) + 1);
  copy(r, (size_t)(c - r->at));
  return 0;
}

static int translate(Reader *r) {
  while (r->at < r->end) {
    int rc = 0;
    switch (*r->at) {
      case '\\':
        rc = escape(r, false);
        break;
      case '[':
        rc = class(r);
        break;
      case '(':
        rc = group(r);
        break;
      case '{':
        rc = counts(r);
        break;
      case '^':
      case '$':
        rc = refuse(r, r->at, 1);
        break;
      default:
        copy(r, 1);
    }
    if (rc) return -1;
  }
  return 0;
}

char *pretokenize_regex(const char *pattern, size_t len, size_t *out_len, Error *err) {
  char *text = NULL;
  Reader r = {pattern, pattern, pattern + len, open_memstream(&text, out_len), err};
  if (!r.out) die("out of memory for a pattern");
  int rc = translate(&r);
  if (fclose(r.out) != 0) die("out of memory for a pattern");
  if (rc == 0) return text;
  free(text);
  return NULL;
}
