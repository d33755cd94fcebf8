/* Deltas of BF16 vectors: kernels/delta.h has the stream. Every block is looked at once: threads
 * find the changes of a block, take its place in the stream in turn, and write. */
#include "kernels/cpu/delta.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#if defined __AVX512BW__ && defined __AVX512VBMI2__
#include "kernels/cpu/delta_wide.h"
#define DELTA_WIDE
#endif

static int block_size(int64_t n, int64_t block) {
  return (int)min_i64(DELTA_BLOCK, n - block * DELTA_BLOCK);
}

/* ---- encode ---- */

static void scan_one(DeltaScan *s, int i, uint16_t now, uint16_t *last) {
  if (now == *last) return;
  int code = delta_code(*last, now);
  s->bitmap[i / 32] |= 1U << i % 32;
  s->entry[s->changes++] = (uint16_t)(i * 16 + code);
  if (code == DELTA_ESCAPE) s->value[s->escapes++] = now;
  *last = now;
}

static uint16_t bits_at(DType type, const void *x, int i) {
  uint16_t bits;
  if (type == DT_BF16) return ((const uint16_t *)x)[i];
  convert_from_f32((const float *)x + i, &bits, DT_BF16, 1);
  return bits;
}

/* Finds the changes of a block, and makes them to what was sent last. */
static void scan_block(const DeltaPart *p, int64_t block, DeltaScan *s) {
  int64_t at = block * DELTA_BLOCK;
  int n = block_size(tensor_numel(p->last), block), i = 0;
  const void *now = (const char *)p->now.data + (size_t)at * dtype_size(p->now.dtype);
  uint16_t *last = (uint16_t *)p->last.data + at;
  s->changes = s->escapes = 0;
  memset(s->bitmap, 0, sizeof s->bitmap);
#ifdef DELTA_WIDE
  i = delta_scan_wide(s, p->now.dtype, now, last, n);
#endif
  for (; i < n; i++) scan_one(s, i, bits_at(p->now.dtype, now, i), last + i);
}

static void write_block(const DeltaScan *s, uint8_t *out) {
  uint32_t codes = delta_codes_bytes(s->changes), end = codes + 2 * (uint32_t)s->escapes;
  if (delta_is_list(s->changes)) {
    memcpy(out, s->entry, codes);
  } else {
    memcpy(out, s->bitmap, sizeof s->bitmap);
    uint8_t *pair = out + DELTA_BITMAP_BYTES;
    int k = 0;
    for (; 2 * k + 1 < s->changes; k++)
      pair[k] = (uint8_t)((s->entry[2 * k] & 15) | (s->entry[2 * k + 1] & 15) << 4);
    if (2 * k < s->changes) pair[k] = s->entry[2 * k] & 15, k++;
    memset(pair + k, 0, codes - DELTA_BITMAP_BYTES - (uint32_t)k);
  }
  memcpy(out + codes, s->value, 2 * (size_t)s->escapes);
  memset(out + end, 0, delta_block_bytes(s->changes, s->escapes) - end);
}

/* The next block's place in the stream, whatever room it has. */
static DeltaHead place_block(const DeltaScan *s, DeltaSize *size) {
  DeltaHead head = {(uint32_t)(size->bytes / 4), (uint16_t)s->changes, (uint16_t)s->escapes};
  size->bytes += delta_block_bytes(s->changes, s->escapes);
  size->changed += (uint64_t)s->changes;
  return head;
}

static void put_block(const DeltaPart *p, int64_t block, DeltaHead head, const DeltaScan *s) {
  uint64_t end = 4 * (uint64_t)head.at + delta_block_bytes(head.changes, head.escapes);
  if (end > p->room) return;
  ((DeltaHead *)p->wire)[block] = head;
  write_block(s, (uint8_t *)p->wire + 4 * (size_t)head.at);
}

static void encode_part(Device *d, const DeltaPart *p, DeltaSize *size) {
  int64_t n = tensor_numel(p->last), blocks = delta_blocks(n);
  require(p->last.dtype == DT_BF16 && tensor_numel(p->now) == n);
  require(p->now.dtype == DT_F32 || p->now.dtype == DT_BF16);
  require((uintptr_t)p->wire % 16 == 0);
  *size = (DeltaSize){(uint64_t)blocks * sizeof(DeltaHead), 0};
#pragma omp parallel for ordered num_threads(d->threads) schedule(static, 1) if (n >= PARALLEL_MIN)
  for (int64_t b = 0; b < blocks; b++) {
    DeltaScan scan;
    DeltaHead head;
    scan_block(p, b, &scan);
#pragma omp ordered
    head = place_block(&scan, size);
    put_block(p, b, head, &scan);
  }
  uint64_t end = size->bytes;
  size->bytes = (end + 15) / 16 * 16;
  if (size->bytes <= p->room && end < size->bytes)
    memset((char *)p->wire + end, 0, size->bytes - end);
}

void cpu_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  for (int i = 0; i < n; i++) encode_part(d, &parts[i], &sizes[i]);
}

/* ---- the other side ---- */

/* What a block of the stream says, for the n elements of x. */
typedef struct Said {
  const uint8_t *in;
  const uint16_t *value;
  int changes, escapes;
  uint64_t end; /* in the stream */
  uint16_t *x;
  int n;
} Said;

static Said said_of(const DeltaPart *p, int64_t block) {
  DeltaHead head = ((const DeltaHead *)p->wire)[block];
  Said s = {.changes = head.changes, .escapes = head.escapes};
  s.in = (const uint8_t *)p->wire + 4 * (size_t)head.at;
  s.end = 4 * (uint64_t)head.at + delta_block_bytes(head.changes, head.escapes);
  s.value = (const uint16_t *)(s.in + delta_codes_bytes(head.changes));
  s.x = (uint16_t *)p->last.data + block * DELTA_BLOCK;
  s.n = block_size(tensor_numel(p->last), block);
  return s;
}

static void broken_stream(void) { die("a delta does not fit its vector: the stream is damaged"); }

static void apply_list(const Said *s) {
  const uint16_t *list = (const uint16_t *)s->in;
  int escapes = 0;
  for (int k = 0; k < s->changes; k++) {
    int place = list[k] / 16, code = list[k] % 16;
    bool is_escape = code == DELTA_ESCAPE;
    if (place >= s->n || escapes + is_escape > s->escapes) broken_stream();
    uint16_t *x = &s->x[place];
    *x = is_escape ? s->value[escapes++] : (uint16_t)(*x + code - DELTA_ESCAPE);
  }
}

/* Values of a word of the bitmap; returns the escapes among them. */
static int change_word(const Said *s, int word, uint32_t bits, const uint8_t *codes,
                       const uint16_t *value) {
  uint16_t *x = s->x + 32 * word;
#ifdef DELTA_WIDE
  if (32 * word + 32 <= s->n) return delta_change_32(x, bits, codes, value);
#endif
  int escapes = 0;
  for (; bits; bits &= bits - 1, codes++) {
    uint16_t *here = &x[__builtin_ctz(bits)];
    *here = *codes == DELTA_ESCAPE ? value[escapes++] : (uint16_t)(*here + *codes - DELTA_ESCAPE);
  }
  return escapes;
}

static int escapes_among(const uint8_t *codes, int n) {
  int escapes = 0;
  for (int k = 0; k < n; k++) escapes += codes[k] == DELTA_ESCAPE;
  return escapes;
}

/* How many bits the bitmap has; dies when one is beyond the vector. */
static int bits_of_map(const Said *s) {
  int bits = 0;
  for (int word = 0; word < DELTA_BLOCK / 32; word++) {
    uint32_t w;
    memcpy(&w, s->in + 4 * word, sizeof w);
    int left = s->n - 32 * word;
    if (left < 32 && w >> (left > 0 ? left : 0)) broken_stream();
    bits += __builtin_popcount(w);
  }
  return bits;
}

static void apply_bitmap(const Said *s) {
  uint8_t codes[DELTA_BLOCK + DELTA_SLACK] = {0};
  const uint8_t *pair = s->in + DELTA_BITMAP_BYTES;
  for (int k = 0; k < (s->changes + 1) / 2; k++) {
    codes[2 * k] = pair[k] & 15;
    codes[2 * k + 1] = pair[k] >> 4;
  }
  if (bits_of_map(s) != s->changes) broken_stream();
  if (escapes_among(codes, s->changes) != s->escapes) broken_stream();
  const uint8_t *code = codes;
  const uint16_t *value = s->value;
  for (int word = 0; word < DELTA_BLOCK / 32; word++) {
    uint32_t bits;
    memcpy(&bits, s->in + 4 * word, sizeof bits);
    if (bits) value += change_word(s, word, bits, code, value);
    code += __builtin_popcount(bits);
  }
}

static bool is_sound(const DeltaPart *p, const Said *s) {
  return s->changes <= s->n && s->escapes <= s->changes && s->end <= p->room;
}

/* Changes lie on lines of their own, which no prefetcher foresees. */
static void ask_ahead_of(const DeltaPart *p, int64_t block) {
  Said s = said_of(p, block);
  const uint16_t *list = (const uint16_t *)s.in;
  if (!is_sound(p, &s) || !delta_is_list(s.changes)) return;
  for (int k = 0; k < s.changes; k++) __builtin_prefetch(&s.x[list[k] / 16], 1);
}

static void apply_block(const DeltaPart *p, int64_t block) {
  Said s = said_of(p, block);
  if (!is_sound(p, &s)) broken_stream();
  if (delta_is_list(s.changes))
    apply_list(&s);
  else
    apply_bitmap(&s);
}

void cpu_delta_apply(Device *d, int n, const DeltaPart *parts) {
  for (int i = 0; i < n; i++) {
    int64_t numel = tensor_numel(parts[i].last), blocks = delta_blocks(numel);
    require(parts[i].last.dtype == DT_BF16);
    if ((uint64_t)blocks * sizeof(DeltaHead) > parts[i].room) broken_stream();
#pragma omp parallel for num_threads(d->threads) schedule(static) if (numel >= PARALLEL_MIN)
    for (int64_t b = 0; b < blocks; b++) {
      if (b + 1 < blocks) ask_ahead_of(&parts[i], b + 1);
      apply_block(&parts[i], b);
    }
  }
}

void cpu_checksum(Device *d, int n, const Tensor *x, uint64_t *sums) {
  for (int i = 0; i < n; i++) {
    int64_t numel = tensor_numel(x[i]);
    const uint16_t *bits = x[i].data;
    uint64_t sum = 0;
    require(x[i].dtype == DT_BF16);
#pragma omp parallel for simd reduction(+ : sum) num_threads(d->threads) if (numel >= PARALLEL_MIN)
    for (int64_t k = 0; k < numel; k++) sum += checksum_term((uint64_t)k, bits[k]);
    sums[i] = sum;
  }
}
