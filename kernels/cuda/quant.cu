/* quant: numbers to and from the wire, all parts of a call in one launch of each kernel that they
 * need: of aligned blocks that are whole quant_one (one plain span, with errors or without),
 * quant_sum and quant_int4 (sums, of int4 back to int4), quant_wide for others; quant_plain between
 * formats without blocks, quant_any for everything else. Bits are the CPU's; a NaN that was
 * computed may be another NaN. */
#include "kernels/cuda/ops.h"
#include "kernels/cuda/quant_parts.h"

enum QuantPath { PATH_ONE, PATH_FED, PATH_SUM, PATH_INT4, PATH_WIDE, PATH_PLAIN, PATH_ANY, PATHS };

/* Parts that wait for their launch. */
struct Pending {
  QuantJob job;
  int64_t chunks;
};

static void launch(cudaStream_t stream, int path, Pending *q) {
  require(q->chunks <= INT32_MAX);
  if (q->chunks > 0) {
    if (path == PATH_ONE || path == PATH_FED) quant_one_launch(stream, q->job, q->chunks);
    if (path == PATH_SUM) quant_sum_launch(stream, q->job, q->chunks);
    if (path == PATH_INT4) quant_int4_launch(stream, q->job, q->chunks);
    if (path == PATH_WIDE) quant_wide_launch(stream, q->job, q->chunks);
    if (path == PATH_PLAIN) quant_plain_launch(stream, q->job, q->chunks);
    if (path == PATH_ANY) quant_any_launch(stream, q->job, q->chunks);
  }
  q->job.n = 0;
  q->chunks = 0;
}

static int path_of(const QuantJob &job, WireFormat from, WireFormat to, const QuantPart &p) {
  if (!wire_has_blocks(from) && !wire_has_blocks(to)) return PATH_PLAIN;
  if (quant_one_takes(job, p)) return p.error ? PATH_FED : PATH_ONE;
  if (quant_sum_takes(job, p)) return PATH_SUM;
  if (quant_int4_takes(job, p)) return PATH_INT4;
  return quant_wide_takes(job, p) ? PATH_WIDE : PATH_ANY;
}

static int64_t chunks_of(const QuantJob &job, int path, const QuantPart &p) {
  if (path == PATH_ONE || path == PATH_FED) return quant_one_chunks(job, p);
  if (path == PATH_SUM) return quant_sum_chunks(job, p);
  if (path == PATH_INT4) return quant_int4_chunks(job, p);
  if (path == PATH_WIDE) return quant_wide_chunks(job, p);
  return path == PATH_PLAIN ? quant_plain_chunks(p) : quant_any_chunks(p);
}

/* `blocks`: the format whose blocks the span is cut into. */
static QuantPart part_of(WireFormat blocks, WireSpan s, WireData from, WireData to,
                         WireFeedback e) {
  QuantPart p = {};
  p.from_scales = static_cast<const char *>(from.scales);
  p.from_payload = static_cast<const char *>(from.payload);
  p.stride = from.n > 1 ? static_cast<int64_t>(from.stride) : 0;
  p.to_scales = static_cast<char *>(to.scales);
  p.to_payload = static_cast<char *>(to.payload);
  p.error = cuda_data<uint16_t>(e.error);
  p.keep = e.decay;
  p.n = from.n;
  p.count = s.count;
  if (!wire_has_blocks(blocks)) return p;
  p.width = s.width;
  p.row_blocks = wire_row_blocks(blocks, s.width);
  p.blocks = wire_blocks(blocks, s);
  p.lead = s.first % s.width;
  p.start = p.lead / blocks.block;
  return p;
}

/* ---- a call: parts are added, the rest is launched at the end ---- */

struct Call {
  cudaStream_t stream;
  WireFormat from, to, blocks;
  Pending pending[PATHS];
};

static void call_start(Call *c, Device *d, WireFormat from, WireFormat to, bool add) {
  c->stream = cuda_stream(d);
  c->from = from;
  c->to = to;
  c->blocks = wire_has_blocks(from) ? from : to;
  for (Pending &q : c->pending) {
    q.chunks = 0;
    q.job.from = from.kind;
    q.job.to = to.kind;
    q.job.from_scale = from.scale;
    q.job.to_scale = to.scale;
    q.job.block = c->blocks.block;
    q.job.add = add;
    q.job.n = 0;
  }
}

static void call_add(Call *c, WireSpan s, WireData from, WireData to, WireFeedback e) {
  require(from.n >= 1);
  require(!e.error.data || (e.error.dtype == DT_BF16 && tensor_numel(e.error) == s.count));
  if (s.count == 0) return;
  QuantPart p = part_of(c->blocks, s, from, to, e);
  int path = path_of(c->pending[0].job, c->from, c->to, p);
  Pending *q = &c->pending[path];
  if (q->job.n == QUANT_PARTS) launch(c->stream, path, q);
  p.first_chunk = q->chunks;
  q->chunks += chunks_of(q->job, path, p);
  q->job.part[q->job.n++] = p;
}

static void call_finish(Call *c) {
  for (int path = 0; path < PATHS; path++) launch(c->stream, path, &c->pending[path]);
}

/* ---- ops ---- */

/* The plain format of a type, and a tensor as a span in it. */
static WireFormat plain_format(DType t) {
  require(t == DT_F32 || t == DT_BF16);
  return {t == DT_F32 ? WIRE_F32 : WIRE_BF16, 0, DT_F32};
}
static WireData plain_data(Tensor x) { return {nullptr, x.data, 1, 0}; }

/* Parts of both types of x go in one call each. */
static void quantize_of(Device *d, DType type, WireFormat f, int n, const WirePart *parts) {
  Call c;
  call_start(&c, d, plain_format(type), f, false);
  for (int i = 0; i < n; i++)
    if (parts[i].x.dtype == type)
      call_add(&c, parts[i].span, plain_data(parts[i].x), parts[i].to, parts[i].e);
  call_finish(&c);
}

static void dequantize_to(Device *d, DType type, WireFormat f, int n, const WirePart *parts,
                          bool add) {
  Call c;
  call_start(&c, d, f, plain_format(type), add);
  for (int i = 0; i < n; i++)
    if (parts[i].x.dtype == type)
      call_add(&c, parts[i].span, parts[i].from, plain_data(parts[i].x), {});
  call_finish(&c);
}

static void check_x(WireFormat f, const WirePart &p) {
  wire_check(f, p.span);
  require(p.x.dtype == DT_F32 || p.x.dtype == DT_BF16);
  require(tensor_numel(p.x) == p.span.count);
}

void cuda_quantize(Device *d, WireFormat f, int n, const WirePart *parts) {
  for (int i = 0; i < n; i++) check_x(f, parts[i]);
  quantize_of(d, DT_F32, f, n, parts);
  quantize_of(d, DT_BF16, f, n, parts);
}

void cuda_dequantize(Device *d, WireFormat f, int n, const WirePart *parts, bool add) {
  for (int i = 0; i < n; i++) check_x(f, parts[i]);
  dequantize_to(d, DT_F32, f, n, parts, add);
  dequantize_to(d, DT_BF16, f, n, parts, add);
}

void cuda_requantize(Device *d, WireFormat f, WireFormat f_to, int n, const WirePart *parts) {
  require(!wire_has_blocks(f) || !wire_has_blocks(f_to) || f.block == f_to.block);
  Call c;
  call_start(&c, d, f, f_to, false);
  for (int i = 0; i < n; i++) {
    wire_check(f, parts[i].span);
    wire_check(f_to, parts[i].span);
    call_add(&c, parts[i].span, parts[i].from, parts[i].to, parts[i].e);
  }
  call_finish(&c);
}
