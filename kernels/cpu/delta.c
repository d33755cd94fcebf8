/* Deltas of BF16 vectors: kernels/delta.h has the stream. Blocks are looked at twice, once for
 * their sizes and once to be written, in parallel: where a block starts depends on all before it.
 */
#include "kernels/delta.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static int block_size(int64_t n, int64_t block) {
  return (int)min_i64(DELTA_BLOCK, n - block * DELTA_BLOCK);
}

/* The bits of a block of `now`. */
static const uint16_t *bits_now(const DeltaPart *p, int64_t block, uint16_t *buffer) {
  int64_t at = block * DELTA_BLOCK;
  if (p->now.dtype == DT_BF16) return (const uint16_t *)p->now.data + at;
  convert_from_f32(tensor_f32(p->now) + at, buffer, DT_BF16,
                   (size_t)block_size(tensor_numel(p->last), block));
  return buffer;
}

static void count_block(const DeltaPart *p, int64_t block, DeltaHead *head) {
  uint16_t buffer[DELTA_BLOCK];
  const uint16_t *now = bits_now(p, block, buffer);
  const uint16_t *last = (const uint16_t *)p->last.data + block * DELTA_BLOCK;
  int n = block_size(tensor_numel(p->last), block), changes = 0, escapes = 0;
#pragma omp simd reduction(+ : changes, escapes)
  for (int i = 0; i < n; i++) {
    changes += now[i] != last[i];
    escapes += (now[i] != last[i]) & (delta_code(last[i], now[i]) == DELTA_ESCAPE);
  }
  head->changes = (uint16_t)changes;
  head->escapes = (uint16_t)escapes;
}

/* Where blocks start; returns the bytes of the stream. */
static uint64_t place_blocks(DeltaHead *heads, int64_t blocks, uint64_t *changed) {
  uint64_t at = (uint64_t)blocks * sizeof *heads;
  *changed = 0;
  for (int64_t b = 0; b < blocks; b++) {
    heads[b].at = (uint32_t)(at / 4);
    at += delta_block_bytes(heads[b].changes, heads[b].escapes);
    *changed += heads[b].changes;
  }
  return (at + 15) / 16 * 16;
}

static void write_block(const DeltaPart *p, int64_t block, DeltaHead head) {
  uint16_t buffer[DELTA_BLOCK];
  const uint16_t *now = bits_now(p, block, buffer);
  uint16_t *last = (uint16_t *)p->last.data + block * DELTA_BLOCK;
  uint8_t *out = (uint8_t *)p->wire + 4 * (size_t)head.at;
  uint16_t *list = (uint16_t *)out, *value = (uint16_t *)(out + delta_codes_bytes(head.changes));
  uint8_t *codes = out + DELTA_BITMAP_BYTES;
  int n = block_size(tensor_numel(p->last), block), k = 0;
  bool is_list = delta_is_list(head.changes);
  memset(out, 0, delta_block_bytes(head.changes, head.escapes));
  for (int i = 0; i < n; i++) {
    if (now[i] == last[i]) continue;
    int code = delta_code(last[i], now[i]);
    if (is_list) {
      list[k] = (uint16_t)(i * 16 + code);
    } else {
      out[i / 8] |= (uint8_t)(1 << i % 8);
      codes[k / 2] |= (uint8_t)(code << k % 2 * 4);
    }
    if (code == DELTA_ESCAPE) *value++ = now[i];
    k++;
  }
  memcpy(last, now, (size_t)n * sizeof *last);
}

static void keep_block(const DeltaPart *p, int64_t block) {
  uint16_t buffer[DELTA_BLOCK];
  memcpy((uint16_t *)p->last.data + block * DELTA_BLOCK, bits_now(p, block, buffer),
         (size_t)block_size(tensor_numel(p->last), block) * sizeof *buffer);
}

static void encode_part(Device *d, const DeltaPart *p, DeltaSize *size) {
  int64_t n = tensor_numel(p->last), blocks = delta_blocks(n);
  require(p->last.dtype == DT_BF16 && tensor_numel(p->now) == n);
  require(p->now.dtype == DT_F32 || p->now.dtype == DT_BF16);
  require((uintptr_t)p->wire % 16 == 0);
  DeltaHead *heads = mem_alloc((size_t)blocks, sizeof *heads);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t b = 0; b < blocks; b++) count_block(p, b, &heads[b]);
  size->bytes = place_blocks(heads, blocks, &size->changed);
  bool fits = size->bytes <= p->room;
  if (fits && blocks) {
    memset((char *)p->wire + size->bytes - 16, 0, 16);
    memcpy(p->wire, heads, (size_t)blocks * sizeof *heads);
  }
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t b = 0; b < blocks; b++) {
    if (fits)
      write_block(p, b, heads[b]);
    else
      keep_block(p, b);
  }
  free(heads);
}

void cpu_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  for (int i = 0; i < n; i++) encode_part(d, &parts[i], &sizes[i]);
}

/* ---- the other side ---- */

static void change(uint16_t *x, int code, const uint16_t **value) {
  *x = code == DELTA_ESCAPE ? *(*value)++ : (uint16_t)(*x + code - DELTA_ESCAPE);
}

static void apply_bitmap(const uint8_t *in, uint16_t *x, const uint16_t *value) {
  const uint8_t *codes = in + DELTA_BITMAP_BYTES;
  int k = 0;
  for (int word = 0; word < DELTA_BLOCK / 64; word++) {
    uint64_t bits;
    memcpy(&bits, in + 8 * word, sizeof bits);
    for (; bits; bits &= bits - 1, k++)
      change(&x[64 * word + __builtin_ctzll(bits)], codes[k / 2] >> k % 2 * 4 & 15, &value);
  }
}

static void apply_block(const DeltaPart *p, int64_t block) {
  DeltaHead head = ((const DeltaHead *)p->wire)[block];
  const uint8_t *in = (const uint8_t *)p->wire + 4 * (size_t)head.at;
  const uint16_t *list = (const uint16_t *)in;
  const uint16_t *value = (const uint16_t *)(in + delta_codes_bytes(head.changes));
  uint16_t *x = (uint16_t *)p->last.data + block * DELTA_BLOCK;
  if (!delta_is_list(head.changes)) {
    apply_bitmap(in, x, value);
    return;
  }
  for (int k = 0; k < head.changes; k++) change(&x[list[k] / 16], list[k] % 16, &value);
}

void cpu_delta_apply(Device *d, int n, const DeltaPart *parts) {
  for (int i = 0; i < n; i++) {
    int64_t numel = tensor_numel(parts[i].last), blocks = delta_blocks(numel);
    require(parts[i].last.dtype == DT_BF16);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (numel >= PARALLEL_MIN)
    for (int64_t b = 0; b < blocks; b++) apply_block(&parts[i], b);
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
