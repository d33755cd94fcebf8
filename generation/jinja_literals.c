/* Literals: strings with escapes, and numbers, as Python spells them. */
#include <stdlib.h>
#include <string.h>

#include "generation/jinja_lexer.h"

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static size_t put_utf8(char *out, uint32_t c) {
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
  out[0] = (char)(lead[n] | c);
  return n;
}

/* \xHH, \uHHHH, \UHHHHHHHH and \ooo. Bytes of s taken behind the backslash; 0: broken. */
static size_t number_escape(const char *s, size_t len, char *out, size_t *n) {
  bool octal = s[0] >= '0' && s[0] <= '7';
  size_t digits = octal ? 3 : s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : 8, at = octal ? 0 : 1, end = at;
  uint32_t c = 0;
  for (; end < len && end - at < digits; end++) {
    int digit = octal && (s[end] < '0' || s[end] > '7') ? -1 : hex_digit(s[end]);
    if (digit < 0) break;
    c = c << (octal ? 3 : 4) | (uint32_t)digit;
  }
  if ((!octal && end - at < digits) || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return 0;
  *n += put_utf8(out + *n, c);
  return end;
}

/* The result is never longer than 2 bytes for each byte. */
const char *literal_str(Slab *slab, const char *s, size_t len, Str *out) {
  static const char letters[] = "\\'\"abfnrtv", meant[] = "\\'\"\a\b\f\n\r\t\v";
  char *text = slab_take(slab, 2 * len + 1);
  size_t n = 0;
  for (size_t i = 0; i < len; i++) {
    if (s[i] != '\\') {
      text[n++] = s[i];
      continue;
    }
    char c = s[++i];
    const char *letter = c ? strchr(letters, c) : NULL;
    if (c == '\n') continue;
    if (letter) {
      text[n++] = meant[letter - letters];
    } else if (c == 'x' || c == 'u' || c == 'U' || (c >= '0' && c <= '7')) {
      size_t taken = number_escape(s + i, len - i, text, &n);
      if (!taken) return "a string has a broken \\ escape";
      i += taken - 1;
    } else if (c == 'N' || (unsigned char)c >= 0x80) {
      return "a string has a \\ escape that is not supported";
    } else {
      text[n++] = '\\';
      text[n++] = c;
    }
  }
  *out = (Str){.text = text, .len = n};
  return NULL;
}

/* ---- numbers ---- */

static size_t digit_run(const char *s, size_t len) {
  size_t n = 0;
  while (n < len && (is_digit(s[n]) || (n && s[n] == '_'))) n++;
  return n;
}

/* Bytes of ".5" and "e-3" at s, behind digits; 0: they are a whole number. */
static size_t fraction(const char *s, size_t len) {
  size_t n = 0, digits;
  if (len && s[0] == '.' && (digits = digit_run(s + 1, len - 1))) n = 1 + digits;
  if (n == len || (s[n] != 'e' && s[n] != 'E')) return n;
  size_t at = n + 1;
  if (at < len && (s[at] == '-' || s[at] == '+')) at++;
  digits = digit_run(s + at, len - at);
  return digits ? at + digits : n;
}

/* 12, 0x1f, 0o17, 0b11 */
static const char *whole_number(const char *digits, size_t n, Value *out) {
  static const char letters[] = "xobXOB";
  static const int bases[] = {16, 8, 2, 16, 8, 2};
  const char *letter = n > 1 && digits[0] == '0' ? strchr(letters, digits[1]) : NULL;
  int64_t base = letter ? bases[letter - letters] : 10, sum = 0;
  for (size_t i = letter ? 2 : 0; i < n; i++) {
    int digit = hex_digit(digits[i]);
    if (digit < 0 || digit >= base || (base == 10 && i && digits[0] == '0' && digit))
      return "a number is broken";
    if (__builtin_mul_overflow(sum, base, &sum) || __builtin_add_overflow(sum, digit, &sum))
      return "a number has more than 64 bits";
  }
  *out = value_of_int(sum);
  return letter && n == 2 ? "a number is broken" : NULL;
}

static bool in_number(char c) {
  return is_digit(c) || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

const char *literal_number(const char *s, size_t len, bool whole, size_t *taken, Value *out) {
  char digits[64];
  size_t n = digit_run(s, len), more = whole ? 0 : fraction(s + n, len - n), kept = 0;
  while (!more && n < len && in_number(s[n])) n++;
  *taken = n + more;
  if (*taken >= sizeof digits) return "a number is too long";
  for (size_t i = 0; i < *taken; i++)
    if (s[i] != '_') digits[kept++] = s[i];
  digits[kept] = 0;
  *out = value_of_float(strtod(digits, NULL));
  return more ? NULL : whole_number(digits, kept, out);
}
