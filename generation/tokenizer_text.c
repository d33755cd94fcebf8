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
 * there, and they become byte tokens.
 *
 * Byte-level BPE (bpe_text.c) has a token for every byte: all of this holds for it without any ifs,
 * but for normal form C and add_prefix_space, where the tokenizer asks for them: those change text
 * for good. */
#include <stdlib.h>
#include <string.h>

#include "generation/tokenizer.h"
#include "generation/unicode.h"

/* SentencePiece takes 240 times as much memory as a text is long: a file in which the end of a text
 * was not found must not take all there is. */
enum { SPM_MOST = 8 << 20 };

static void push_id(void *ctx, int32_t id) { token_list_push(ctx, id); }

/* Text without special tokens. offset: of it in the caller's text, for messages. */
static int encode_spm(const Tokenizer *t, const char *text, size_t len, size_t offset, bool prefix,
                      TokenList *out, Error *err) {
  for (size_t at = 0; at < len;) {
    size_t run = utf8_run(text + at, len - at);
    char msg[512] = "";
    if (run > SPM_MOST)
      return error_set(err, "a text of %zu bytes is longer than SentencePiece is given, %d MiB",
                       len, SPM_MOST >> 20);
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

/* A part of the text on its way through the passes: first the added tokens are taken out of it,
 * then the normalized ones of what they leave, and the rest is the engine's. */
typedef struct Stretch {
  const char *text;
  const char *content; /* NULL: none of it is content */
  size_t len, offset;
  bool special; /* special tokens are looked for */
  bool prefix;  /* a space belongs before it */
} Stretch;

static bool stands_alone(const Stretch *s, size_t at, size_t len) {
  size_t size, end = at + len;
  return (at == 0 || !unicode_is_word(utf8_last(s->text, at, &size))) &&
         (end == s->len || !unicode_is_word(utf8_first(s->text + end, s->len - end, &size)));
}

/* The longest added token that stands at a place, or NULL; a special one not on content. */
static const Added *added_at(const Tokenizer *t, int pass, const Stretch *s, size_t at) {
  if (!t->starts[pass][(uint8_t)s->text[at]]) return NULL;
  for (int i = 0; i < t->n_added; i++) {
    const Added *a = &t->added[i];
    if (a->special && !s->special) continue;
    if (a->len > s->len - at || memcmp(a->text, s->text + at, a->len) != 0) continue;
    if (a->special && s->content && memchr(s->content + at, 1, a->len)) continue;
    if (a->single_word && !stands_alone(s, at, a->len)) continue;
    if (tokenizer_pass(t, a) == pass) return a;
  }
  return NULL;
}

/* The blanks that end the text, that it starts with. */
static size_t blanks_before(const char *text, size_t len) {
  size_t at = len, size;
  while (at > 0 && unicode_is_space(utf8_last(text, at, &size))) at -= size;
  return len - at;
}
static size_t blanks_behind(const char *text, size_t len) {
  size_t at = 0, size;
  while (at < len && unicode_is_space(utf8_first(text + at, len - at, &size))) at += size;
  return at;
}

static int encode_stretch(const Tokenizer *t, int pass, Stretch s, TokenList *out, Error *err);

/* Its part [from, end) in the next pass. */
static int encode_part(const Tokenizer *t, int pass, const Stretch *s, size_t from, size_t end,
                       bool prefix, TokenList *out, Error *err) {
  Stretch part = {s->text + from, s->content ? s->content + from : NULL,
                  end - from,     s->offset + from,
                  s->special,     prefix};
  return encode_stretch(t, pass + 1, part, out, err);
}

static int encode_pass(const Tokenizer *t, int pass, const Stretch *s, TokenList *out, Error *err) {
  bool prefix = s->prefix;
  size_t from = 0, at = 0;
  while (t->looks[pass] && at < s->len) {
    const Added *a = added_at(t, pass, s, at);
    if (!a) {
      at++;
      continue;
    }
    size_t end = at - (a->lstrip ? blanks_before(s->text + from, at - from) : 0);
    if (encode_part(t, pass, s, from, end, prefix, out, err)) return -1;
    token_list_push(out, a->id);
    at += a->len;
    if (a->rstrip) at += blanks_behind(s->text + at, s->len - at);
    from = at;
    prefix = t->prefix && t->prefix_each;
  }
  return encode_part(t, pass, s, from, s->len, prefix, out, err);
}

static int encode_stretch(const Tokenizer *t, int pass, Stretch s, TokenList *out, Error *err) {
  if (s.len == 0) return 0;
  if (pass == 0) return encode_pass(t, pass, &s, out, err);
  if (pass < ADDED_PASSES) {
    size_t len;
    char *normal = t->nfc ? unicode_nfc(s.text, s.len, &len) : NULL;
    if (normal) s = (Stretch){normal, NULL, len, s.offset, false, s.prefix};
    int rc = encode_pass(t, pass, &s, out, err);
    free(normal);
    return rc;
  }
  if (t->bpe) return tokenizer_encode_bytes(t, s.text, s.len, s.offset, s.prefix, out, err);
  return encode_spm(t, s.text, s.len, s.offset, s.prefix, out, err);
}

static int encode(const Tokenizer *t, const char *text, const char *content, size_t len, int flags,
                  TokenList *out, Error *err) {
  int before = out->n;
  if (flags & TOK_BOS) {
    if (t->bos < 0) return error_set(err, "the tokenizer has no BOS token");
    token_list_push(out, t->bos);
  }
  int body = out->n;
  Stretch all = {.text = text,
                 .content = content,
                 .len = len,
                 .special = flags & TOK_SPECIAL,
                 .prefix = t->prefix && !(flags & TOK_CONTINUE)};
  if (encode_stretch(t, 0, all, out, err)) {
    out->n = before;
    return -1;
  }
  /* A template that spells the BOS token itself does not get a second one. */
  if (body > before && out->n > body && out->v[body] == t->bos && t->added_of[t->bos] >= 0) {
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
    if (t->spm && id < spm_size(t->spm) && spm_kind(t->spm, id) == SPM_UNKNOWN) {
      const char *unknown = spm_unknown_text(t->spm, &len);
      text_put(s, unknown, len);
    } else if (!a->special) {
      text_put(s, a->text, a->len);
    }
    return;
  }
  const char *piece = t->bpe ? bpe_token(t->bpe, id, &len) : spm_piece(t->spm, id, &len);
  if (t->bpe) {
    text_put(s, piece, len);
  } else if (spm_kind(t->spm, id) == SPM_BYTE && len == strlen("<0x0A>")) {
    char byte = (char)strtoul(piece + strlen("<0x"), NULL, 16);
    text_put(s, &byte, 1);
  } else {
    bool drop = *strip && len >= SIGN && memcmp(piece, space_sign, SIGN) == 0;
    put_piece(s, piece + (drop ? SIGN : 0), len - (drop ? SIGN : 0));
    if (drop && !t->traits.squeezes_spaces) *strip = false;
  }
}

static bool is_known(const Tokenizer *t, int32_t id) {
  if (id < 0 || id >= t->vocab_size) return false;
  size_t len;
  if (t->added_of[id] >= 0) return true;
  return t->bpe ? bpe_token(t->bpe, id, &len) != NULL : id < spm_size(t->spm);
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int n, size_t *len, Error *err) {
  Text s = {.v = mem_alloc(64, 1), .cap = 64};
  bool strip = t->prefix || t->traits.squeezes_spaces;
  for (int i = 0; i < n; i++) {
    if (!is_known(t, ids[i])) {
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
