/* The tables of a Bpe: byte strings to ids and back, pairs of ids to ranks. */
#include <stdlib.h>
#include <string.h>

#include "generation/bpe_internal.h"
#include "generation/unicode.h"

/* ---- the byte alphabet: printable Latin-1 stands for itself, the rest for U+0100 and on ---- */

enum { ALPHABET_END = 0x144 };

static bool is_printable(unsigned byte) {
  return (byte > ' ' && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
}

/* byte_of[c]: the byte that the character c stands for, -1: none. */
static void make_alphabet(int16_t byte_of[ALPHABET_END]) {
  for (int c = 0; c < ALPHABET_END; c++) byte_of[c] = -1;
  int next = 0x100;
  for (unsigned byte = 0; byte < 256; byte++)
    byte_of[is_printable(byte) ? (int)byte : next++] = (int16_t)byte;
}

/* The bytes that a key stands for (never more than the key has) and how many; false when a
 * character of it is not of the alphabet: then it stands for itself. */
static bool key_bytes(const char *key, size_t len, char *bytes, size_t *n) {
  int16_t byte_of[ALPHABET_END];
  make_alphabet(byte_of);
  *n = 0;
  for (size_t at = 0, size; at < len; at += size) {
    uint32_t c = utf8_first(key + at, len - at, &size);
    if (c >= ALPHABET_END || byte_of[c] < 0) {
      memcpy(bytes, key, len);
      *n = len;
      return false;
    }
    bytes[(*n)++] = (char)byte_of[c];
  }
  return true;
}

/* ---- tokens ---- */

/* FNV-1a. */
static uint32_t hash_bytes(const char *s, size_t len, bool literal) {
  uint32_t h = 2166136261u ^ literal;
  for (size_t i = 0; i < len; i++) h = (h ^ (uint8_t)s[i]) * 16777619u;
  return h;
}

int bpe_lookup(const Bpe *b, const char *bytes, size_t len, bool literal) {
  if (b->n_token_slots == 0) return -1;
  uint32_t hash = hash_bytes(bytes, len, literal), mask = b->n_token_slots - 1;
  for (uint32_t slot = hash & mask; b->token_slots[slot] >= 0; slot = (slot + 1) & mask) {
    const BpeToken *t = &b->tokens[b->token_slots[slot]];
    if (t->hash == hash && t->len == len && t->literal == literal &&
        memcmp(b->pool + t->start, bytes, len) == 0)
      return b->token_slots[slot];
  }
  return -1;
}

static void put_slot(int32_t *slots, uint32_t n_slots, uint32_t hash, int32_t value) {
  uint32_t slot = hash & (n_slots - 1);
  while (slots[slot] >= 0) slot = (slot + 1) & (n_slots - 1);
  slots[slot] = value;
}

static int32_t *free_slots(uint32_t n) {
  int32_t *slots = mem_alloc(n, sizeof *slots);
  memset(slots, 0xff, n * sizeof *slots);
  return slots;
}

static void grow_token_slots(Bpe *b) {
  free(b->token_slots);
  b->n_token_slots = b->n_token_slots ? 2 * b->n_token_slots : 1024;
  b->token_slots = free_slots(b->n_token_slots);
  for (int id = 0; id < b->n_tokens; id++)
    if (b->tokens[id].there) put_slot(b->token_slots, b->n_token_slots, b->tokens[id].hash, id);
}

/* Room for the token `id`; ids that are passed over are holes. */
static BpeToken *token_at(Bpe *b, int id) {
  if (id >= b->cap_tokens) {
    int cap = id + 1 > 2 * b->cap_tokens ? id + 1 : 2 * b->cap_tokens;
    b->tokens = mem_grow(b->tokens, (size_t)cap, sizeof *b->tokens);
    memset(b->tokens + b->cap_tokens, 0, (size_t)(cap - b->cap_tokens) * sizeof *b->tokens);
    b->cap_tokens = cap;
  }
  if (id >= b->n_tokens) b->n_tokens = id + 1;
  return &b->tokens[id];
}

static uint32_t pool_reserve(Bpe *b, size_t len) {
  if (b->n_pool + len > b->cap_pool) {
    b->cap_pool = 2 * (b->n_pool + len);
    b->pool = mem_grow(b->pool, b->cap_pool, 1);
  }
  return (uint32_t)b->n_pool;
}

int bpe_add_token(Bpe *b, const char *key, size_t len, int64_t id, Error *err) {
  if (len == 0) return error_set(err, "the token of id %lld is empty", (long long)id);
  if (id < 0 || id > BPE_MAX_ID)
    return error_set(err, "token \"%s\": id %lld; expected 0 to %d", key, (long long)id,
                     BPE_MAX_ID);
  if (b->n_pool + len > UINT32_MAX) return error_set(err, "the tokens are over 4 GiB");
  BpeToken t = {.start = pool_reserve(b, len), .there = true};
  size_t n;
  t.literal = !key_bytes(key, len, b->pool + t.start, &n);
  t.len = (uint32_t)n;
  int same = bpe_lookup(b, b->pool + t.start, n, t.literal);
  if (same >= 0)
    return error_set(err, "token \"%s\" has the ids %d and %lld", key, same, (long long)id);
  BpeToken *to = token_at(b, (int)id);
  if (to->there)
    return error_set(err, "token \"%s\": id %lld is another token's already", key, (long long)id);
  t.hash = hash_bytes(b->pool + t.start, n, t.literal);
  *to = t;
  b->n_pool += n;
  if (n > b->longest) b->longest = n;
  if (n == 1 && !t.literal) b->byte_id[(uint8_t)b->pool[t.start]] = (int32_t)id;
  if (++b->n_used * 2 > b->n_token_slots)
    grow_token_slots(b);
  else
    put_slot(b->token_slots, b->n_token_slots, t.hash, (int32_t)id);
  return 0;
}

int bpe_find(const Bpe *b, const char *key, size_t len) {
  size_t n;
  char *bytes = mem_alloc(len + 1, 1);
  bool literal = !key_bytes(key, len, bytes, &n);
  int id = bpe_lookup(b, bytes, n, literal);
  free(bytes);
  return id;
}

int bpe_size(const Bpe *b) { return b->n_tokens; }

static bool is_there(const Bpe *b, int id) {
  return id >= 0 && id < b->n_tokens && b->tokens[id].there;
}

const char *bpe_token(const Bpe *b, int id, size_t *len) {
  if (!is_there(b, id)) return NULL;
  *len = b->tokens[id].len;
  return b->pool + b->tokens[id].start;
}

bool bpe_is_byte(const Bpe *b, int id) {
  return is_there(b, id) && b->tokens[id].len == 1 && !b->tokens[id].literal;
}

bool bpe_is_merged(const Bpe *b, int id) { return is_there(b, id) && b->tokens[id].merged; }

void bpe_forbid(Bpe *b, int id) {
  if (is_there(b, id)) b->tokens[id].forbidden = true;
}

/* ---- merges ---- */

static uint32_t hash_pair(int32_t left, int32_t right) {
  uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
  return (uint32_t)(h >> 32);
}

int bpe_rank(const Bpe *b, int32_t left, int32_t right) {
  uint32_t mask = b->n_merge_slots - 1;
  for (uint32_t slot = hash_pair(left, right) & mask; b->merge_slots[slot] >= 0;
       slot = (slot + 1) & mask) {
    const BpeMerge *m = &b->merges[b->merge_slots[slot]];
    if (m->left == left && m->right == right) return b->merge_slots[slot];
  }
  return -1;
}

int bpe_add_merge(Bpe *b, const char *left, size_t left_len, const char *right, size_t right_len,
                  Error *err) {
  BpeMerge m = {bpe_find(b, left, left_len), bpe_find(b, right, right_len), -1};
  const char *unknown = m.left < 0 ? left : right;
  if (m.left < 0 || m.right < 0)
    return error_set(err, "\"%.*s\" is not in the vocabulary",
                     (int)(m.left < 0 ? left_len : right_len), unknown);
  const BpeToken *l = &b->tokens[m.left], *r = &b->tokens[m.right];
  size_t n = (size_t)l->len + r->len;
  char *both = mem_alloc(n + 1, 1);
  memcpy(both, b->pool + l->start, l->len);
  memcpy(both + l->len, b->pool + r->start, r->len);
  m.result = l->literal || r->literal ? -1 : bpe_lookup(b, both, n, false);
  free(both);
  if (m.result < 0)
    return error_set(err, "\"%.*s%.*s\" is not in the vocabulary", (int)left_len, left,
                     (int)right_len, right);
  b->tokens[m.result].merged = true;
  if (b->n_merges == b->cap_merges) {
    b->cap_merges = b->cap_merges ? 2 * b->cap_merges : 1024;
    b->merges = mem_grow(b->merges, (size_t)b->cap_merges, sizeof *b->merges);
  }
  b->merges[b->n_merges++] = m;
  return 0;
}

/* Of a pair that comes twice, the last rank counts, as in other readers of these files. */
static void index_merges(Bpe *b) {
  b->n_merge_slots = 2;
  while (b->n_merge_slots < 2 * (uint32_t)b->n_merges) b->n_merge_slots *= 2;
  b->merge_slots = free_slots(b->n_merge_slots);
  for (int32_t rank = 0; rank < b->n_merges; rank++) {
    const BpeMerge *m = &b->merges[rank];
    if (b->tokens[m->result].forbidden) continue;
    uint32_t mask = b->n_merge_slots - 1, slot = hash_pair(m->left, m->right) & mask;
    while (b->merge_slots[slot] >= 0) {
      const BpeMerge *other = &b->merges[b->merge_slots[slot]];
      if (other->left == m->left && other->right == m->right) break;
      slot = (slot + 1) & mask;
    }
    b->merge_slots[slot] = rank;
  }
}

/* Most words are tokens. Which tokens their own bytes are merged to is found out once, so that such
 * a word costs one look-up. */
static void mark_whole(Bpe *b, bool whole_words) {
  BpeWork work = {0};
  TokenList ids = {0};
  for (int id = 0; id < b->n_tokens; id++) {
    BpeToken *t = &b->tokens[id];
    if (!t->there || t->literal || t->forbidden) continue;
    size_t bad;
    ids.n = 0;
    t->whole = whole_words || t->len == 1 ||
               (t->merged && !bpe_encode_word(b, &work, b->pool + t->start, t->len, &ids, &bad) &&
                ids.n == 1 && ids.v[0] == id);
  }
  token_list_free(&ids);
  bpe_work_free(&work);
}

void bpe_finish(Bpe *b, bool whole_words) {
  index_merges(b);
  mark_whole(b, whole_words);
}

Bpe *bpe_create(void) {
  Bpe *b = mem_zalloc(1, sizeof *b);
  memset(b->byte_id, 0xff, sizeof b->byte_id);
  return b;
}

void bpe_free(Bpe *b) {
  if (!b) return;
  free(b->tokens);
  free(b->pool);
  free(b->token_slots);
  free(b->merges);
  free(b->merge_slots);
  free(b);
}
