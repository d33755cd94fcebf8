/* Text to ids and back.
 *
 * Most SentencePiece models put one space before a text ("dummy prefix"), so that a word is spelled
 * the same at the start as in the middle; decode takes one space away from the start again. So
 * decode(encode(x)) == x, leading spaces included, for every x that has no U+2581 (SentencePiece's
 * own sign for a space, which comes back as a space), if the model neither squeezes spaces nor
 * normalises nor has to write the unknown token. Ids are decoded to bytes one by one, so that the
 * text of the first k ids is the start of the text of all: what streams never changes. It may end
 * inside a UTF-8 character.
 *
 * Bytes that are not UTF-8 never reach SentencePiece (it would make U+FFFD of them): text is cut
 * there, and they become byte tokens. */
#include <stdlib.h>
#include <string.h>

#include "generation/tokenizer.h"

static void push_id(void *ctx, int32_t id) { token_list_push(ctx, id); }

/* Length of the UTF-8 character at s (RFC 3629: no overlong forms, no surrogates), 0 if broken. */
static size_t utf8_char(const uint8_t *s, size_t n) {
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

static size_t utf8_run(const char *text, size_t len) {
  size_t at = 0, c;
  while (at < len && (c = utf8_char((const uint8_t *)text + at, len - at)) > 0) at += c;
  return at;
}

/* Text without special tokens. offset: of it in the caller's text, for messages. */
static int encode_plain(const Tokenizer *t, const char *text, size_t len, size_t offset,
                        bool prefix, TokenList *out, Error *err) {
  for (size_t at = 0; at < len;) {
    size_t run = utf8_run(text + at, len - at);
    char msg[512] = "";
    if (run > 0 &&
        spm_encode(t->spm, text + at, run, prefix && at == 0, push_id, out, msg, sizeof msg))
      return error_set(err, "SentencePiece cannot encode the text at byte %zu: %s", offset + at,
                       msg);
    at += run;
    if (at == len) break;
    uint8_t byte = (uint8_t)text[at];
    if (t->byte_id[byte] < 0)
      return error_set(err,
                       "byte %zu of the text is 0x%02X, which is not UTF-8, and the vocabulary has "
                       "no token for such a byte",
                       offset + at, byte);
    token_list_push(out, t->byte_id[byte]);
    at++;
  }
  return 0;
}

/* The longest added token at the start of text, or NULL; a special one not on content (may be NULL:
 * none). */
static const Added *added_at(const Tokenizer *t, const char *text, const char *content, size_t len,
                             bool special) {
  if (!t->starts[(uint8_t)*text]) return NULL;
  for (int i = 0; i < t->n_added; i++) {
    const Added *a = &t->added[i];
    if (a->len > len || memcmp(a->text, text, a->len) != 0) continue;
    bool on_content = content && memchr(content, 1, a->len);
    if (!a->special || (special && !on_content)) return a;
  }
  return NULL;
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static int encode_pieces(const Tokenizer *t, const char *text, const char *content, size_t len,
                         int flags, TokenList *out, Error *err) {
  bool special = flags & TOK_SPECIAL, prefix = t->prefix && !(flags & TOK_CONTINUE);
  size_t from = 0, at = 0;
  while (at < len) {
    const Added *a = added_at(t, text + at, content ? content + at : NULL, len - at, special);
    if (!a) {
      at++;
      continue;
    }
    size_t end = at;
    while (a->lstrip && end > from && is_blank(text[end - 1])) end--;
    if (encode_plain(t, text + from, end - from, from, prefix, out, err)) return -1;
    token_list_push(out, a->id);
    at += a->len;
    while (a->rstrip && at < len && is_blank(text[at])) at++;
    from = at;
    prefix = t->prefix && t->prefix_each;
  }
  return encode_plain(t, text + from, len - from, from, prefix, out, err);
}

static int encode(const Tokenizer *t, const char *text, const char *content, size_t len, int flags,
                  TokenList *out, Error *err) {
  int before = out->n;
  if (flags & TOK_BOS) {
    if (t->bos < 0) return error_set(err, "the tokenizer has no BOS token");
    token_list_push(out, t->bos);
  }
  int body = out->n;
  if (encode_pieces(t, text, content, len, flags, out, err)) {
    out->n = before;
    return -1;
  }
  /* A template that spells the BOS token itself does not get a second one. */
  if (body > before && out->n > body && out->v[body] == t->bos) {
    memmove(out->v + before, out->v + body, (size_t)(out->n - body) * sizeof *out->v);
    out->n--;
  }
  return 0;
}

int tokenizer_encode(const Tokenizer *t, const char *text, size_t len, int flags, TokenList *out,
                     Error *err) {
  return encode(t, text, NULL, len, flags, out, err);
}

int tokenizer_encode_template(const Tokenizer *t, const char *text, const char *content, size_t len,
                              int flags, TokenList *out, Error *err) {
  return encode(t, text, content, len, flags | TOK_SPECIAL, out, err);
}

/* A growing string. */
typedef struct Text {
  char *v;
  size_t n, cap;
} Text;

static void text_put(Text *s, const char *bytes, size_t n) {
  if (s->n + n + 1 > s->cap) {
    s->cap = 2 * (s->n + n + 1);
    s->v = mem_grow(s->v, s->cap, 1);
  }
  memcpy(s->v + s->n, bytes, n);
  s->n += n;
}

static const char space_sign[] = "\xe2\x96\x81"; /* U+2581 */
enum { SIGN = sizeof space_sign - 1 };

static void put_piece(Text *s, const char *piece, size_t len) {
  for (size_t i = 0; i < len;) {
    bool space = len - i >= SIGN && memcmp(piece + i, space_sign, SIGN) == 0;
    text_put(s, space ? " " : piece + i, 1);
    i += space ? SIGN : 1;
  }
}

/* *strip: the space that encode put first is still to come. */
static void put_token(const Tokenizer *t, int32_t id, Text *s, bool *strip) {
  size_t len;
  if (t->added_of[id] >= 0) {
    const Added *a = &t->added[t->added_of[id]];
    if (id < spm_size(t->spm) && spm_kind(t->spm, id) == SPM_UNKNOWN) {
      const char *unknown = spm_unknown_text(t->spm, &len);
      text_put(s, unknown, len);
    } else if (!a->special) {
      text_put(s, a->text, a->len);
    }
    return;
  }
  const char *piece = spm_piece(t->spm, id, &len);
  if (spm_kind(t->spm, id) == SPM_BYTE && len == strlen("<0x0A>")) {
    char byte = (char)strtoul(piece + strlen("<0x"), NULL, 16);
    text_put(s, &byte, 1);
  } else {
    bool drop = *strip && len >= SIGN && memcmp(piece, space_sign, SIGN) == 0;
    put_piece(s, piece + (drop ? SIGN : 0), len - (drop ? SIGN : 0));
    if (drop && !t->traits.squeezes_spaces) *strip = false;
  }
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int n, size_t *len, Error *err) {
  Text s = {.v = mem_alloc(64, 1), .cap = 64};
  bool strip = t->prefix || t->traits.squeezes_spaces;
  for (int i = 0; i < n; i++) {
    bool known = ids[i] >= 0 && ids[i] < t->vocab_size &&
                 (ids[i] < spm_size(t->spm) || t->added_of[ids[i]] >= 0);
    if (!known) {
      free(s.v);
      error_set(err, "token %d of %d is %d; the tokenizer has %d tokens", i + 1, n, ids[i],
                t->vocab_size);
      return NULL;
    }
    put_token(t, ids[i], &s, &strip);
    if (s.n > 0) strip = false;
  }
  text_put(&s, "", 1);
  if (len) *len = s.n - 1;
  return s.v;
}
