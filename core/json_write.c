/* JSON writing: numbers that read back to the same bits, strings that are always valid UTF-8. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/json.h"

/* "-0" would read back as the integer 0, which has no sign. */
static void put_number(FILE *f, const char *text) { fputs(!strcmp(text, "-0") ? "-0.0" : text, f); }

void json_put_f32(FILE *f, float x) {
  if (!isfinite(x)) {
    fputs("null", f);
    return;
  }
  char text[40];
  /* Any 6 digits name at most one normal float, so that "%.6g", whose trailing zeros are dropped,
   * is then the shortest; denormals have fewer. */
  int digits = isnormal(x) ? 6 : 1;
  do snprintf(text, sizeof text, "%.*g", digits, (double)x);
  while (digits++ < 9 && strtof(text, NULL) != x);
  put_number(f, text);
}

void json_put_f64(FILE *f, double x) {
  if (!isfinite(x)) {
    fputs("null", f);
    return;
  }
  char text[40];
  int digits = isnormal(x) ? 15 : 1;
  do snprintf(text, sizeof text, "%.*g", digits, x);
  while (digits++ < 17 && strtod(text, NULL) != x);
  put_number(f, text);
}

/* Bytes of the UTF-8 character at s, 0 when it is not one (overlong forms, surrogates, beyond
 * U+10FFFF: RFC 3629). */
static size_t utf8_length(const unsigned char *s, size_t left) {
  if (s[0] < 0x80) return 1;
  size_t n = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
  if (s[0] < 0xC2 || s[0] > 0xF4 || left < n) return 0;
  for (size_t i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
  return n;
}

static void put_ascii(FILE *f, unsigned char c) {
  static const char plain[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
  const char *at = c ? strchr(plain, c) : NULL;
  if (at)
    fprintf(f, "\\%c", letter[at - plain]);
  else if (c < 0x20)
    fprintf(f, "\\u%04x", c);
  else
    fputc(c, f);
}

void json_put_str(FILE *f, const char *s, size_t len) {
  const unsigned char *p = (const unsigned char *)s;
  fputc('"', f);
  for (size_t i = 0; i < len;) {
    size_t n = utf8_length(p + i, len - i);
    if (n == 0)
      fputs("\xEF\xBF\xBD", f);
    else if (n == 1)
      put_ascii(f, p[i]);
    else
      fwrite(p + i, 1, n, f);
    i += n ? n : 1;
  }
  fputc('"', f);
}

void json_put_i32_array(FILE *f, const int32_t *v, size_t n) {
  fputc('[', f);
  for (size_t i = 0; i < n; i++) fprintf(f, i ? ",%d" : "%d", v[i]);
  fputc(']', f);
}

void json_put_f32_array(FILE *f, const float *v, size_t n) {
  fputc('[', f);
  for (size_t i = 0; i < n; i++) {
    if (i) fputc(',', f);
    json_put_f32(f, v[i]);
  }
  fputc(']', f);
}
