/* quant: numbers to and from the wire at the speed of memory.
 *
 * A span is walked block by block; a block is summed, scaled and coded while it lies in the first
 * cache. Threads take runs of blocks, and no sum crosses a block, so results do not depend on their
 * number. quant_reference.c says the same one element at a time. */
#include "kernels/cpu/quant_codes.h"

#include <float.h>

#include "kernels/cpu/quant.h"
#include "kernels/cpu/quant_int4.h"
#include "kernels/cpu/quant_walk.h"
#if defined __AVX512F__ && defined __AVX512BW__ && defined __AVX512DQ__ && defined __FMA__
#include "kernels/cpu/quant_feedback.h"
#include "kernels/cpu/quant_int4_wide.h"
#include "kernels/cpu/quant_sum.h"
#include "kernels/cpu/quant_sum_plain.h"
#define QUANT_WIDE
#endif

enum {
  RUN = 128,       /* blocks that a thread walks at a time */
  LARGE = 1 << 22, /* elements that no cache holds till they are read again */
  AHEAD = 1024     /* floats that are asked for before they are needed */
};

typedef struct Codec {
  EncodeBlock *encode;
  DecodeBlock *decode;
  DecodeFour *decode_four;
  float most; /* largest code */
} Codec;

static const Codec codecs[] = {
    [WIRE_F32] = {encode_f32, decode_f32, four_f32, 0},
    [WIRE_BF16] = {encode_bf16, decode_bf16, four_bf16, 0},
    [WIRE_INT8] = {encode_int8, decode_int8, four_int8, 127},
    [WIRE_INT4] = {encode_int4, decode_int4, four_int4, 7},
    [WIRE_FP8] = {encode_fp8, decode_fp8, four_fp8, 448},
};

/* ---- scales ---- */

static uint32_t largest_magnitude(const float *x, int64_t n) {
  uint32_t most = 0;
#ifdef QUANT_WIDE
  if (n % STEP == 0) return largest_wide(x, n);
#endif
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) {
    uint32_t u = bits_of_float(x[i]) & 0x7fffffffU;
    most = u > most ? u : most;
  }
  return most;
}

float quant_scale(WireFormat f, uint32_t magnitude) {
  float most = codecs[f.kind].most;
  if (magnitude >= 0x7f800000U) return NAN;
  float s = float_of_bits(magnitude) / most;
  if (f.scale == DT_BF16) s = float_of_bf16(bf16_of_float(s));
  if (s < FLT_MIN) return 0; /* its inverse would not be finite */
  while (isinf(s * most))
    s = float_of_bits(bits_of_float(s) - (f.scale == DT_BF16 ? 1U << 16 : 1U));
  return s;
}

/* ---- codes of a block: by vectors where it is made of them ---- */

/* past_cache: what is written is read much later, if a cache would hold it at all. */
static void encode_block(WireKind kind, const float *x, int64_t n, float inverse, bool past_cache,
                         void *out) {
  (void)past_cache;
#ifdef QUANT_WIDE
  if (n % STEP == 0) {
    bool lines = past_cache && (uintptr_t)out % 64 == 0;
    encode_block_wide(kind, x, n, inverse, lines, out);
    return;
  }
#endif
  codecs[kind].encode(x, n, inverse, out);
}

static void decode_block(WireKind kind, const void *in, int64_t n, float scale, bool add,
                         bool past_cache, float *y) {
  (void)past_cache;
#ifdef QUANT_WIDE
  if (n % STEP == 0) {
    bool lines = past_cache && (uintptr_t)y % 64 == 0;
    decode_block_wide(kind, in, n, scale, add, lines, y);
    return;
  }
#endif
  codecs[kind].decode(in, n, scale, add, y);
}

/* y += the blocks of four ranks, or y = their sum. */
static void decode_four(WireKind kind, const uint8_t *const *in, int64_t n, const float *scale,
                        bool add, float *y) {
#ifdef QUANT_WIDE
  if (n % STEP == 0) {
    decode_four_wide(kind, in, n, scale, add, y);
    return;
  }
#endif
  for (int64_t i = 0; !add && i < n; i++) y[i] = -0.0f; /* plus x is x, also where x is -0 */
  codecs[kind].decode_four(in, n, scale, y);
}

static void add_error(const float *x, const uint16_t *error, int64_t n, float *sent) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) sent[i] = x[i] + float_of_bf16(error[i]);
}

/* error = keep * error + (1 - keep) * (sent - what the codes say). */
static void keep_error(WireKind kind, const void *in, int64_t n, float scale, float keep,
                       const float *sent, uint16_t *error) {
  float got[WIRE_MAX_BLOCK];
  codecs[kind].decode(in, n, scale, false, got);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float lost = (1 - keep) * (sent[i] - got[i]);
    error[i] = bf16_of_float(fmaf(keep, float_of_bf16(error[i]), lost));
  }
}

/* ---- one block ---- */

/* The scale of a block of x, put to the wire. */
static float encode_scale(WireFormat f, const Place *p, const float *x, const WireData *to) {
  if (!wire_has_blocks(f)) return 1;
  float scale = quant_scale(f, largest_magnitude(x, p->n));
  put_scale(f, to->scales, p->i, scale);
  return scale;
}

static void encode_codes(WireFormat f, const Place *p, const float *x, float scale, bool past_cache,
                         const WireData *to) {
  static const float zeros[WIRE_MAX_BLOCK];
  float inverse = scale > 0 ? 1 / scale : 0;
  encode_block(f.kind, isnan(scale) ? zeros : x, p->n, inverse, past_cache,
               payload_of(f.kind, to, p));
}

/* Behind blocks that were written past the cache: other threads see them now. */
static void fence(void) {
#ifdef QUANT_WIDE
  _mm_sfence();
#endif
}

/* Where source r of a block lies, and its scale. */
static const uint8_t *source(WireFormat f, const Place *p, const WireData *from, int r,
                             float *scale) {
  size_t skip = (size_t)r * from->stride;
  *scale = 1;
  if (wire_has_blocks(f)) *scale = get_scale(f, (const char *)from->scales + skip, p->i);
  return (const uint8_t *)payload_of(f.kind, from, p) + skip;
}

static void decode(WireFormat f, const Place *p, const WireData *from, bool add, bool past_cache,
                   float *y) {
  const uint8_t *in[FOUR];
  float scale[FOUR];
  int r = 0;
  if (!add && from->n < FOUR) {
    in[0] = source(f, p, from, 0, scale);
    decode_block(f.kind, in[0], p->n, scale[0], false, past_cache && from->n == 1, y);
    r = 1;
  }
  for (; r + FOUR <= from->n; r += FOUR) {
    for (int k = 0; k < FOUR; k++) in[k] = source(f, p, from, r + k, &scale[k]);
    decode_four(f.kind, in, p->n, scale, add || r > 0, y);
  }
  for (; r < from->n; r++) {
    in[0] = source(f, p, from, r, scale);
    decode_block(f.kind, in[0], p->n, scale[0], true, false, y);
  }
}

#ifdef QUANT_WIDE
/* encode_with_error for whole steps of vectors. */
static void encode_fed_steps(WireFormat f, const Place *p, const float *x, WireFeedback e,
                             bool past_cache, const WireData *to) {
  _Alignas(64) float sent[WIRE_MAX_BLOCK];
  uint16_t *error = (uint16_t *)e.error.data + p->at;
  void *out = payload_of(f.kind, to, p);
  if (f.kind == WIRE_F32) {
    fed_f32_wide(x, p->n, e.decay, error, past_cache && (uintptr_t)out % 64 == 0, out);
  } else if (f.kind == WIRE_BF16) {
    fed_bf16_wide(x, p->n, e.decay, error, out);
  } else {
    float scale = quant_scale(f, add_error_wide(x, error, p->n, sent));
    put_scale(f, to->scales, p->i, scale);
    if (isnan(scale)) {
      encode_codes(f, p, sent, scale, false, to);
      memset(error, 0, (size_t)p->n * sizeof *error);
    } else {
      encode_fed_wide(f.kind, sent, p->n, scale, e.decay, error, out);
    }
  }
}
#endif

/* x to the wire with the block's error in front and what is lost behind. */
static void encode_with_error(WireFormat f, const Place *p, const float *x, WireFeedback e,
                              bool past_cache, const WireData *to) {
  _Alignas(64) float sent[WIRE_MAX_BLOCK];
  uint16_t *error = (uint16_t *)e.error.data + p->at;
  (void)past_cache;
#ifdef QUANT_WIDE
  if (p->n % FED_STEP == 0) {
    encode_fed_steps(f, p, x, e, past_cache, to);
    return;
  }
#endif
  add_error(x, error, p->n, sent);
  float scale = encode_scale(f, p, sent, to);
  encode_codes(f, p, sent, scale, false, to);
  if (isnan(scale))
    memset(error, 0, (size_t)p->n * sizeof *error);
  else
    keep_error(f.kind, payload_of(f.kind, to, p), p->n, scale, e.decay, sent, error);
}

/* ---- ops ---- */

static void check_feedback(WireFeedback e, WireSpan s) {
  require(!e.error.data || (e.error.dtype == DT_BF16 && tensor_numel(e.error) == s.count));
}

/* While a block is coded, nothing reads memory unless it was asked for. */
static void ask_ahead(const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(x + i + AHEAD);
}

static void quantize_part(Device *d, WireFormat f, const WirePart *part) {
  const WireSpan s = part->span;
  const Tensor x = part->x;
  const WireFeedback e = part->e;
  const WireData to = part->to;
  const bool large = s.count > LARGE;
  wire_check(f, s);
  check_feedback(e, s);
  require(x.dtype == DT_F32 && tensor_numel(x) == s.count);
  const Walk w = walk_of(f, s);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (s.count >= PARALLEL_MIN)
  for (int64_t run = 0; run < w.blocks; run += RUN) {
    Place p = walk_start(&w, run);
    for (int64_t end = min_i64(w.blocks, run + RUN); p.i < end; walk_next(&w, &p)) {
      const float *here = tensor_f32(x) + p.at;
      ask_ahead(here, p.n);
      if (e.error.data)
        encode_with_error(f, &p, here, e, large, &to);
      else
        encode_codes(f, &p, here, encode_scale(f, &p, here, &to), large, &to);
    }
    if (large) fence();
  }
}

static void dequantize_part(Device *d, WireFormat f, const WirePart *part, bool add) {
  const WireSpan s = part->span;
  const Tensor y = part->x;
  const WireData from = part->from;
  wire_check(f, s);
  require(from.n >= 1 && y.dtype == DT_F32 && tensor_numel(y) == s.count);
  const Walk w = walk_of(f, s);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (s.count >= PARALLEL_MIN)
  for (int64_t run = 0; run < w.blocks; run += RUN) {
    Place p = walk_start(&w, run);
    for (int64_t end = min_i64(w.blocks, run + RUN); p.i < end; walk_next(&w, &p))
      decode(f, &p, &from, add, s.count > LARGE, tensor_f32(y) + p.at);
    if (s.count > LARGE) fence();
  }
}

/* From one format to itself in registers, where that can be done: how many blocks from p on, at
 * most `most`, were. */
static int64_t requantize_run(WireFormat f, WireFormat f_to, const Walk *w, const Place *p,
                              int64_t most, const WireData *from, const WireData *to) {
#ifdef QUANT_WIDE
  int64_t whole = w->width % w->block == 0 ? most : (w->width - p->column) / w->block;
  bool plain = plain_takes(f.kind, w->block, from->n);
  if (f.kind != f_to.kind || whole == 0) return 0;
  if (!plain && !sum_takes(f.kind, w->block, from->n)) return 0;
  SumRun run = {.from = f,
                .to = f_to,
                .in = (const uint8_t *)payload_of(f.kind, from, p),
                .stride = from->stride,
                .n = from->n,
                .out = (uint8_t *)payload_of(f.kind, to, p),
                .block = w->block,
                .blocks = min_i64(whole, most)};
  run.past_cache = w->blocks * w->block > LARGE && (uintptr_t)run.out % 64 == 0;
  if (plain) return plain_run(f.kind, &run);
  run.scales = (const char *)from->scales + (size_t)p->i * dtype_size(f.scale);
  run.out_scales = (char *)to->scales + (size_t)p->i * dtype_size(f_to.scale);
  return sum_run(f.kind, &run);
#else
  (void)f, (void)f_to, (void)w, (void)p, (void)most, (void)from, (void)to;
  return 0;
#endif
}

/* The same for sums of int4, all or nothing: tells how many blocks from p on it went over, and
 * which of them are done. */
static int64_t int4_run(WireFormat f, WireFormat f_to, const Walk *w, const Place *p, int64_t most,
                        const WireData *from, const WireData *to, bool *done) {
  int64_t whole = w->width % w->block == 0 ? most : (w->width - p->column) / w->block;
  Int4Run run = {.from = f,
                 .to = f_to,
                 .in = (const uint8_t *)payload_of(WIRE_INT4, from, p),
                 .scales = (const char *)from->scales + (size_t)p->i * dtype_size(f.scale),
                 .stride = from->stride,
                 .n = from->n,
                 .out = (uint8_t *)payload_of(WIRE_INT4, to, p),
                 .out_scales = (char *)to->scales + (size_t)p->i * dtype_size(f_to.scale),
                 .block = whole > 0 ? w->block : p->n,
                 .blocks = whole > 0 ? min_i64(whole, min_i64(most, INT4_RUN)) : 1};
  Int4Weights weights;
  int4_weights(&run, &weights);
#ifdef QUANT_WIDE
  if (run.block == 128 || run.block == 256) {
    run.past_cache = w->blocks * w->block > LARGE && (uintptr_t)run.out % 64 == 0;
    int4_blocks_wide(&run, &weights, done);
    return run.blocks;
  }
#endif
  for (int64_t i = 0; i < run.blocks; i++) done[i] = int4_block(&run, &weights, i);
  return run.blocks;
}

static void requantize_block(WireFormat f, WireFormat f_to, const Place *p, const WirePart *part) {
  _Alignas(64) float sum[WIRE_MAX_BLOCK];
  const WireData *to = &part->to;
  bool large = part->span.count > LARGE;
  decode(f, p, &part->from, false, false, sum);
  if (part->e.error.data)
    encode_with_error(f_to, p, sum, part->e, large, to);
  else
    encode_codes(f_to, p, sum, encode_scale(f_to, p, sum, to), large, to);
}

static void requantize_blocks(WireFormat f, WireFormat f_to, const Walk *w, Place p, int64_t end,
                              const WirePart *part) {
  const WireData *from = &part->from, *to = &part->to;
  bool fed = part->e.error.data, integers = !fed && int4_takes(f, f_to, from->n), done[INT4_RUN];
  while (p.i < end) {
    int64_t n = 0;
    if (integers) {
      n = int4_run(f, f_to, w, &p, end - p.i, from, to, done);
      for (int64_t i = 0; i < n; i++) {
        Place block = walk_start(w, p.i + i);
        if (!done[i]) requantize_block(f, f_to, &block, part);
      }
    } else if (!fed) {
      n = requantize_run(f, f_to, w, &p, end - p.i, from, to);
    }
    if (n > 0) {
      p = walk_start(w, p.i + n);
    } else {
      requantize_block(f, f_to, &p, part);
      walk_next(w, &p);
    }
  }
}

static void requantize_part(Device *d, WireFormat f, WireFormat f_to, const WirePart *part) {
  const WireSpan s = part->span;
  wire_check(f, s);
  wire_check(f_to, s);
  check_feedback(part->e, s);
  require(part->from.n >= 1);
  require(!wire_has_blocks(f) || !wire_has_blocks(f_to) || f.block == f_to.block);
  const Walk w = walk_of(wire_has_blocks(f) ? f : f_to, s);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (s.count >= PARALLEL_MIN)
  for (int64_t run = 0; run < w.blocks; run += RUN) {
    requantize_blocks(f, f_to, &w, walk_start(&w, run), min_i64(w.blocks, run + RUN), part);
    if (s.count > LARGE) fence();
  }
}

void cpu_quantize(Device *d, WireFormat f, int n, const WirePart *parts) {
  for (int i = 0; i < n; i++) quantize_part(d, f, &parts[i]);
}

void cpu_dequantize(Device *d, WireFormat f, int n, const WirePart *parts, bool add) {
  for (int i = 0; i < n; i++) dequantize_part(d, f, &parts[i], add);
}

void cpu_requantize(Device *d, WireFormat f, WireFormat f_to, int n, const WirePart *parts) {
  for (int i = 0; i < n; i++) requantize_part(d, f, f_to, &parts[i]);
}
