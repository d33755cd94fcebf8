/* Characters: UTF-8 as bytes, and the little of Unicode that tokenizers need (classes and NFC, from
 * utf8proc). */
#ifndef GENERATION_UNICODE_H
#define GENERATION_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the UTF-8 character at s, n > 0 bytes (RFC 3629: no overlong forms, no surrogates); 0
 * if broken. */
static inline size_t utf8_char(const uint8_t *s, size_t n) {
  if (s[0] < 0x80) return 1;
  size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
  if (s[0] < 0xc2 || s[0] > 0xf4 || n < len) return 0;
  uint8_t lo = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
  uint8_t hi = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
  if (s[1] < lo || s[1] > hi) return 0;
  for (size_t i = 2; i < len; i++)
    if ((s[i] & 0xc0) != 0x80) return 0;
  return len;
}

/* How many bytes at the start of text are whole characters. */
static inline size_t utf8_run(const char *text, size_t len) {
  size_t at = 0, c;
  while (at < len && (c = utf8_char((const uint8_t *)text + at, len - at)) > 0) at += c;
  return at;
}

/* The character at the start of text; *size its length in bytes, 1 for a byte that is no UTF-8,
 * which counts as U+FFFD. len > 0. */
uint32_t utf8_first(const char *text, size_t len, size_t *size);
/* The same for the character that ends the text. */
uint32_t utf8_last(const char *text, size_t len, size_t *size);

bool unicode_is_space(uint32_t c); /* White_Space */
bool unicode_is_word(uint32_t c);  /* a letter, mark, digit or connector, as \w */

/* The text in normal form C, malloc'ed; bytes that are no UTF-8 stay as they are and part it. NULL
 * when the text is in that form already. */
char *unicode_nfc(const char *text, size_t len, size_t *out_len);

#endif
