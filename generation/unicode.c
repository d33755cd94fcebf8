/* Character classes and normal form C, through utf8proc. */
#include "generation/unicode.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "core/error.h"

enum { NO_CHARACTER = 0xfffd };

uint32_t utf8_first(const char *text, size_t len, size_t *size) {
  const uint8_t *s = (const uint8_t *)text;
  size_t n = utf8_char(s, len);
  *size = n ? n : 1;
  if (n == 0) return NO_CHARACTER;
  uint32_t c = n == 1 ? s[0] : s[0] & (0x7fu >> n);
  for (size_t i = 1; i < n; i++) c = c << 6 | (s[i] & 0x3fu);
  return c;
}

uint32_t utf8_last(const char *text, size_t len, size_t *size) {
  for (size_t n = 1; n <= 4 && n <= len; n++)
    if (utf8_char((const uint8_t *)text + len - n, n) == n)
      return utf8_first(text + len - n, n, size);
  *size = 1;
  return NO_CHARACTER;
}

bool unicode_is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
  return c == 0x85 || k == UTF8PROC_CATEGORY_ZS || k == UTF8PROC_CATEGORY_ZL ||
         k == UTF8PROC_CATEGORY_ZP;
}

bool unicode_is_word(uint32_t c) {
  switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

/* Every character below U+0300 is in normal form C, and none of them goes into the one before it:
 * only text with lead bytes from 0xCC on has to be looked at. */
static bool may_change(const char *text, size_t len) {
  for (size_t i = 0; i < len; i++)
    if ((uint8_t)text[i] >= 0xcc) return true;
  return false;
}

static utf8proc_uint8_t *compose(const char *text, size_t len, size_t *n) {
  utf8proc_uint8_t *out = NULL;
  utf8proc_ssize_t got = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)len, &out,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  if (got < 0) die("normal form C of %zu bytes: %s", len, utf8proc_errmsg(got));
  *n = (size_t)got;
  return out;
}

char *unicode_nfc(const char *text, size_t len, size_t *out_len) {
  if (!may_change(text, len)) return NULL;
  char *out = mem_alloc(len + 1, 1);
  size_t n = 0;
  for (size_t at = 0; at < len;) {
    size_t run = utf8_run(text + at, len - at), size;
    utf8proc_uint8_t *part = compose(text + at, run, &size);
    at += run;
    size_t broken = at;
    while (at < len && !utf8_char((const uint8_t *)text + at, len - at)) at++;
    out = mem_grow(out, n + size + (at - broken) + 1, 1);
    memcpy(out + n, part, size);
    memcpy(out + n + size, text + broken, at - broken);
    n += size + (at - broken);
    free(part);
  }
  *out_len = n;
  if (n != len || memcmp(out, text, len) != 0) return out;
  free(out);
  return NULL;
}
