/* kernels: all that touches a device: memory, math, collectives. The only interface to them.
 *
 * A Device is one back end on one rank. Its Ops table holds every kernel; the CPU's are in cpu/
 * (the readable reference, and fast), CUDA's repeat the names in cuda/. Both live in one binary and
 * a test can open both and compare.
 *
 * Contracts that hold for every op:
 * - tensors are contiguous, row-major, in device memory; outputs do not alias inputs unless it says
 * so;
 * - ops are queued in order on the device's compute stream; device_sync waits (the CPU runs at
 * once);
 * - float tensors have the compute type: F32 on the CPU, F32 or BF16 on CUDA, one for all operands
 * of a call. Always F32: row statistics, logits and what is computed from them, gradients of
 * weights (dw), rotary tables, random numbers, masters and moments. Sums are taken in F32;
 * - sizes of zero are fine and do nothing; a shape that does not fit the contract dies;
 * - same inputs, same device, same thread count: same bits. Nothing is summed by atomics.
 */
#ifndef KERNELS_H
#define KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/tensor.h"

typedef struct Device Device;

/* C = alpha * op(A) op(B) + beta * C. beta = 0 never reads C (it may hold NaN). */
typedef enum GemmKind {
  GEMM_NT, /* C[m,n] = A[m,k] B[n,k]^T   y = x W^T        (forward) */
  GEMM_NN, /* C[m,n] = A[m,k] B[k,n]     dx = dy W        (input gradient) */
  GEMM_TN  /* C[m,n] = A[k,m]^T B[k,n]   dW += dy^T x     (weight gradient) */
} GemmKind;

/* The heads of one attention layer. qkv rows are [q: H x D | k: K x D | v: K x D], Q = (H + 2K) D
 * wide. */
typedef struct AttnShape {
  int n_heads, n_kv_heads, head_dim;
  float scale; /* of q.k, usually 1/sqrt(head_dim) */
  int window;  /* sliding window: token t sees (t - window, t]; 0: all of 0..t */
} AttnShape;

/* Where each token stands and the tables of rotary angles, as the op rope takes them; absent (no
 * cos_Pr.data) where a model has none. */
typedef struct Rotation {
  Tensor positions_N, cos_Pr, sin_Pr;
} Rotation;

/* Of the MLPs without a gate. GELU_TANH is Hugging Face's gelu_new (gelu_pytorch_tanh). */
typedef enum Activation { ACT_RELU, ACT_GELU, ACT_GELU_TANH } Activation;

/* Packed sequences: sequence b is rows offsets[b] .. offsets[b+1). offsets is host memory. */
typedef struct Segments {
  int n_seqs;
  const int32_t *offsets; /* [n_seqs + 1], host */
  Tensor device_offsets;  /* the same, I32 device memory; the CPU needs none */
} Segments;

typedef struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
  float grad_scale; /* multiplies the gradient first: clip coefficient and unscaling in one */
  int64_t t;        /* 1-based step, for bias correction */
} AdamW;

/* What a token is drawn from. In the order of Hugging Face's processors: the logits' repetition
 * penalty, bans, temperature, top_k, top_p, min_p; each on what the one before left. */
typedef struct SampleParams {
  float temperature; /* > 0; ignored when greedy, and so are the filters */
  int top_k;         /* the k likeliest; 0: off */
  float top_p;       /* the fewest of the likeliest that weigh so much together; 1: off */
  bool greedy;       /* argmax, ties to the lowest id */
  float min_p;       /* at least so many times as likely as the likeliest (Nguyen et al. 2024, arXiv
                        2407.01082); 0: off, at most 1 */
  float repetition_penalty; /* of ids that were there: logit / penalty where above 0, logit *
                               penalty below (Keskar et al. 2019, arXiv 1909.05858); 0, 1: off */
} SampleParams;
static inline bool sample_penalizes(SampleParams p) {
  return p.repetition_penalty > 0 && (p.repetition_penalty < 1 || p.repetition_penalty > 1);
}

/* The ids that a row's sequence has had, for the repetition penalty: bit id % 8 of byte id / 8 of
 * bits[slot]. No two rows share a slot; a row with slot -1 has had none. */
typedef struct SeenTokens {
  Tensor bits_SW;  /* U8, W = (V + 7) / 8 */
  Tensor slot_B;   /* I32 */
  Tensor newest_B; /* I32, in range: had as well, and sample sets its bit */
} SeenTokens;

/* Where sample writes which ids a row's token was drawn from: bits of row b at bits[step][b], as
 * SeenTokens has them. Absent: nowhere. */
typedef struct KeptTokens {
  Tensor bits_TBW; /* U8 */
  Tensor step_1;   /* I32; absent: 0 */
} KeptTokens;

/* What a Linear does to its input on the way in. RMSNORM: as rmsnorm_fwd, by norm_K and eps.
 * SWIGLU: x rows are [g: K | u: K], as swiglu_fwd. */
typedef enum Front { FRONT_NONE, FRONT_RMSNORM, FRONT_SWIGLU } Front;

/* The rows of a batch that decodes without the host. I32 device memory unless it says otherwise. A
 * row with len 0 is inert: its slot is -1, its other numbers are in range and mean nothing.
 * Otherwise its newest token is number len - 1, with its position and slot, and u is the random
 * number of what is drawn behind it. */
typedef struct DecodeRows {
  int page_size, first; /* first: the position of token 0 */
  uint64_t seed;        /* of random numbers; core/rng.h */
  Tensor token_B, position_B, len_B, slot_B, table_BP;
  Tensor end_B;    /* a row becomes inert when it has this many tokens */
  Tensor stream_B; /* I64: the row's stream of random numbers; the index is a token's number */
  Tensor u_B;      /* F32 */
  Tensor drawn_B, logprob_B;                   /* of sample; logprob F32 */
  Tensor step_1;                               /* counts the calls */
  Tensor history_token_TB, history_logprob_TB; /* what was drawn at each step; -1 by inert rows */
} DecodeRows;

/* How numbers travel and how a secondary copy is kept. INT8, INT4 and FP8 (e4m3) quantize: `block`
 * consecutive elements of one row share a scale = largest |x| / (127, 7, 448), and an element is
 * its code times the scale, codes rounded to nearest even. A block with a NaN or an infinity has
 * the scale NaN: every element of it arrives as NaN, none is ever taken for a number. Zero is
 * exact; a block whose scale would be below 2^-126 becomes zero. A block of n INT4 codes is (n + 1)
 * / 2 bytes, each with element i in its low half and element (n + 1) / 2 + i in its high half. */
typedef enum WireKind { WIRE_F32, WIRE_BF16, WIRE_INT8, WIRE_INT4, WIRE_FP8 } WireKind;
typedef struct WireFormat {
  WireKind kind;
  int block;   /* even, at most WIRE_MAX_BLOCK; F32 and BF16 have no blocks */
  DType scale; /* DT_F32, or DT_BF16: the range of gradients is beyond float16's */
} WireFormat;
enum { WIRE_MAX_BLOCK = 4096 };

/* Elements [first, first + count) of a matrix in row-major order with rows of `width`. Blocks are
 * counted from the start of every row, the last of a row may be shorter; in a format with blocks
 * the span starts and ends where blocks do. */
typedef struct WireSpan {
  int64_t width, first, count;
} WireSpan;
int64_t wire_blocks(WireFormat f, WireSpan s); /* 0 where the format has none */
size_t wire_scale_bytes(WireFormat f, WireSpan s);
size_t wire_payload_bytes(WireFormat f, WireSpan s);

/* Whether a Linear may have its weights, rows of so many numbers, in codes of this format, and the
 * most numbers. */
bool linear_codes_fit(WireFormat f, int64_t width);
enum { LINEAR_CODES_MOST = 12288 };

/* A span on the wire. Several of one shape (blocks from several ranks) lie `stride` bytes apart. */
typedef struct WireData {
  void *scales, *payload;
  int n;
  size_t stride;
} WireData;

/* Error feedback (LoCo, arXiv 2407.04480): what is sent is h = x + e; e becomes decay * e + (1 -
 * decay) * (h - what arrives). error is BF16 [count], absent: none. Of a block that is not finite e
 * becomes zero. */
typedef struct WireFeedback {
  Tensor error;
  float decay;
} WireFeedback;

/* One parameter's span between memory (x) and the wire. Units have a dozen: an op takes them all at
 * once. */
typedef struct WirePart {
  WireSpan span;
  Tensor x; /* [count], F32 or BF16 */
  WireFeedback e;
  WireData from, to;
} WirePart;

/* What changed in a vector since it was sent last, without loss: a stream that says, for each block
 * of DELTA_BLOCK elements, which BF16 values are others and how (kernels/delta.h). */
typedef struct DeltaPart {
  Tensor now;  /* [n] F32 or BF16: encode rounds it to BF16. apply needs none */
  Tensor last; /* [n] BF16: what was sent last; becomes what is sent now */
  void *wire;  /* the stream, 16-byte aligned */
  size_t room; /* bytes that encode may write there; for apply, the stream's: it reads no others */
} DeltaPart;
/* What encode says of a part: bytes of its stream, a multiple of 16, and values that changed. Above
 * `room` the stream is of no use (last has become now all the same). */
typedef struct DeltaSize {
  uint64_t bytes, changed;
} DeltaSize;
enum { DELTA_BLOCK = 4096 };

/* y = front(x) W^T + b, added to y where `add` says so: what decoding does between attentions. W is
 * w_OK, or, where there are codes, a span of whole rows as `format` has it on the wire
 * (linear_codes_fit, device_takes_codes); w_OK then only has dims. */
typedef struct Linear {
  Front front;
  Tensor norm_K;
  float eps;
  Tensor w_OK;
  WireFormat format;
  WireData codes;  /* payload NULL: none */
  Tensor bias_O;   /* may be absent */
  Tensor front_MK; /* room for front(x) where it is made by itself; absent with FRONT_NONE */
  bool add;
} Linear;

/* Some columns of one of the matrices that lie one after another in x, of `stride` columns and from
 * element `from` on. */
typedef struct ColumnPart {
  int64_t from, stride, width, to;
} ColumnPart;

typedef struct Ops {
  /* a and b of one type; c of that type or F32. */
  void (*gemm)(Device *, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c);
  /* y = x W^T + b in one pass. */
  void (*linear_bias)(Device *, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO);

  /* y_NC = table_VC[tokens_N] ; tokens is I32 device memory, ids in [0, V). */
  void (*embedding_fwd)(Device *, Tensor tokens_N, Tensor table_VC, Tensor y_NC);
  /* dtable_VC += dy rows; tokens that occur several times are added in token order. */
  void (*embedding_bwd)(Device *, Tensor tokens_N, Tensor dy_NC, Tensor dtable_VC);

  /* RMSNorm (Zhang & Sennrich 2019): y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps).
   * If delta_NC is present, x_NC is first replaced by x + delta (the residual stream, in place).
   * rstd_N may be absent when no backward follows. y may be absent (only the residual add). */
  void (*rmsnorm_fwd)(Device *, Tensor x_NC, Tensor delta_NC, Tensor w_C, float eps, Tensor y_NC,
                      Tensor rstd_N);
  /* dx_NC += gradient through the norm (the residual's own gradient is already in dx); dw_C +=. */
  void (*rmsnorm_bwd)(Device *, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor rstd_N, Tensor dx_NC,
                      Tensor dw_C);

  /* LayerNorm (Ba et al. 2016): y = (x - mean) rstd w + b, rstd = 1/sqrt(var + eps), biased var.
   * delta, y and the statistics (both or none) as in rmsnorm_fwd. */
  void (*layernorm_fwd)(Device *, Tensor x_NC, Tensor delta_NC, Tensor w_C, Tensor b_C, float eps,
                        Tensor y_NC, Tensor mean_N, Tensor rstd_N);
  /* dx_NC += ; dw_C += ; db_C +=. */
  void (*layernorm_bwd)(Device *, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor mean_N,
                        Tensor rstd_N, Tensor dx_NC, Tensor dw_C, Tensor db_C);

  /* RMSNorm of every q head (weight wq_D) and k head (wk_D) by itself; v is copied. rstd_NH: [N, H
   * + K], may be absent when no backward follows. */
  void (*qk_norm_fwd)(Device *, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, float eps, AttnShape s,
                      Tensor qkv_NQ, Tensor rstd_NH);
  /* In place: dqkv becomes the gradient of raw. dwq_D += ; dwk_D +=. */
  void (*qk_norm_bwd)(Device *, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, Tensor rstd_NH,
                      AttnShape s, Tensor dqkv_NQ, Tensor dwq_D, Tensor dwk_D);

  /* Rotary embedding (Su et al. 2021), Hugging Face's half-split pairing: (x[i], x[i + rot/2]) for
   * i < rot/2, rot = 2 * dim[1] of cos. In place on the q and k heads of qkv_NQ. cos, sin: [P,
   * rot/2]; positions_N: I32 in [0, P). inverse = true applies the transpose (the gradient). */
  void (*rope)(Device *, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
               AttnShape s, bool inverse);

  /* Causal attention over packed sequences, grouped queries (head h uses kv head h / (H/K)).
   * out_N(HD); lse_NH = log sum exp of the scaled scores, may be absent when no backward follows.
   */
  void (*attention_fwd)(Device *, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                        Tensor lse_NH);
  /* dqkv_NQ is written whole. With a rotation, dq and dk are those in front of it: qkv is rope's
   * result, and rope's transpose follows. */
  void (*attention_bwd)(Device *, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                        Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ);

  /* Paged KV cache: pages are [n_pages, page_size, K, D], one tensor for k and one for v per layer;
   * how a page is laid out inside is the back end's own affair.
   * slot_N (I32) = page * page_size + place of each row's token; nothing is written for -1. */
  void (*kv_write)(Device *, Tensor qkv_NQ, Tensor slot_N, AttnShape s, Tensor k_pages,
                   Tensor v_pages);
  /* One query per sequence: row b of qkv_BQ (its q heads) against the first len_B[b] cached tokens
   * of sequence b (its own, already written, included). page_table_BP: I32 page ids. Where len is 0
   * out is 0. */
  void (*attention_decode)(Device *, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B, AttnShape s,
                           Tensor k_pages, Tensor v_pages, Tensor out_BHD);

  /* rope, then kv_write, in one. cos and sin may be absent: only kv_write. */
  void (*rope_write)(Device *, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
                     AttnShape s, Tensor slot_N, Tensor k_pages, Tensor v_pages);
  /* y_MO has the compute type or F32; it does not alias x. A row's bits do not depend on the other
   * rows while there are at most 16. What l holds may be read before linear,
   * decode_attend and the op in front of a row of these are done. */
  void (*linear)(Device *, Linear l, Tensor x, Tensor y_MO);
  /* rope_write, then attention_decode, of rows whose newest token is number len - 1, in one; of r:
   * position, slot, table and len. Those and the pages, but for the newest token, may be read as
   * early as what linear holds. qkv is of no use afterwards. */
  void (*decode_attend)(Device *, DecodeRows r, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                        AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD);
  /* Every row goes on to the token that was drawn for it: history, token, len, position, slot, u;
   * step counts on. */
  void (*decode_advance)(Device *, DecodeRows r);

  /* Columns of matrices with n rows each, side by side: y[i, to + c] = x[from + i * stride + c] for
   * c in [0, width) and every part; add: y += . Parts do not overlap in y. */
  void (*join_columns)(Device *, int n_parts, const ColumnPart *parts, Tensor x, Tensor y_NC,
                       bool add);

  /* SwiGLU (Shazeer 2020): y_NF = silu(g) * u with gu_N2F rows = [g: F | u: F]. */
  void (*swiglu_fwd)(Device *, Tensor gu_N2F, Tensor y_NF);
  /* dgu may be gu. y_NF (may be absent): what the forward made, once more, for who did not keep it.
   */
  void (*swiglu_bwd)(Device *, Tensor dy_NF, Tensor gu_N2F, Tensor dgu_N2F, Tensor y_NF);

  /* y = act(x); dx = dy act'(x). */
  void (*act_fwd)(Device *, Activation kind, Tensor x_NF, Tensor y_NF);
  void (*act_bwd)(Device *, Activation kind, Tensor dy_NF, Tensor x_NF, Tensor dx_NF);

  void (*bias_add)(Device *, Tensor x_NC, Tensor b_C);    /* x += b */
  void (*bias_grad)(Device *, Tensor dy_NC, Tensor db_C); /* db += column sums */

  /* Log-softmax of logits * inv_temp: logprob_R of target_R (I32), lse_R, and entropy_R (may be
   * absent). */
  void (*logprob_fwd)(Device *, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor logprob_R,
                      Tensor lse_R, Tensor entropy_R);
  /* d loss / d logits, given d loss / d logprob and (may be absent) d loss / d entropy. Needs lse_R
   * and, with dentropy_R, entropy_R of the forward. dlogits has the compute type; it may be logits
   * itself where that is F32. */
  void (*logprob_bwd)(Device *, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor lse_R,
                      Tensor entropy_R, Tensor dlogprob_R, Tensor dentropy_R, Tensor dlogits_RV);

  void (*gather_rows)(Device *, Tensor x_NC, Tensor rows_R, Tensor y_RC); /* y = x[rows] */
  void (*scatter_add_rows)(Device *, Tensor y_RC, Tensor rows_R,
                           Tensor x_NC); /* x[rows] += y; a row may repeat */

  /* One token per row of logits. Filters as SampleParams says; u_B in (0,1) is the row's random
   * number. token_B I32; logprob_B = log of the probability it was drawn with (after penalty,
   * temperature and filters; greedy: of the unfiltered softmax, after the penalty, at temperature
   * 1). banned_V: U8 per id, 1 = never (may be absent). seen: needed where sample_penalizes, else
   * left alone. kept: not with greedy. */
  void (*sample)(Device *, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                 SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B);
  /* Logits of ids whose bit is 0 become -infinity; bits_RW as SeenTokens has them. */
  void (*keep_only)(Device *, Tensor bits_RW, Tensor logits_RV);

  /* AdamW (Loshchilov & Hutter 2019) on fp32, as PyTorch computes it: decay w *= 1 - lr * wd first.
   * g is F32 or BF16. out (may be absent): the new w once more, rounded to BF16. */
  void (*adamw)(Device *, AdamW p, Tensor w, Tensor g, Tensor m, Tensor v, Tensor out);
  /* Sum of squares of x (F32 or BF16) in double, host result; NaN or Inf in x makes it non-finite.
   * Fixed order. */
  double (*sum_squares)(Device *, Tensor x);
  void (*axpy)(Device *, float alpha, Tensor x, Tensor y); /* y += alpha x */
  void (*scale)(Device *, float alpha, Tensor x); /* x *= alpha; alpha = 0 writes 0 also over NaN */
  void (*lerp)(Device *, float w, Tensor x, Tensor y); /* y = w y + (1 - w) x  (EMA, decay w) */

  /* To the wire: x -> to, in each part; to.n is 1. Parts do not overlap. */
  void (*quantize)(Device *, WireFormat f, int n, const WirePart *parts);
  /* x: the sum of from.n spans, added in order in fp32 (each product and sum one fused rounding);
   * add: to what x holds already, which comes first. */
  void (*dequantize)(Device *, WireFormat f, int n, const WirePart *parts, bool add);
  /* Sum as dequantize, from -> to, then to the wire again, in one pass. Two formats with blocks
   * have the same block. From INT4 to INT4 without e the sums of 2 to 16 spans are integers: an
   * element's is that of its codes times w_r, the scales s_r of its block in units of 2^(x - 11),
   * rounded to nearest even, where x is the exponent of s_0 + s_1 + ... in fp32. With the largest
   * |sum| A, the block's scale is A unit / 7 in fp32, then in its type; with M the largest integer
   * below 2^23 unit / scale in fp32, codes are sum M / 2^23 to the nearest, ties to zero. That
   * is off by what rounded scales are, half a unit of a code: at most n / 80 of a step beside the
   * half that any code is. Blocks with A < 2048, a negative scale or s_0 + s_1 + ... not in
   * [2^-100, 2^100) are summed as the others. */
  void (*requantize)(Device *, WireFormat f, WireFormat f_to, int n, const WirePart *parts);

  /* sizes: [n], device memory. */
  void (*delta_encode)(Device *, int n, const DeltaPart *parts, DeltaSize *sizes);
  /* A stream that does not fit its vector, or is cut off, dies; nothing else is written. */
  void (*delta_apply)(Device *, int n, const DeltaPart *parts);
  /* sums[i], device memory: of the bits of x[i] (BF16 [any]) and their places, modulo 2^64. */
  void (*checksum)(Device *, int n, const Tensor *x, uint64_t *sums);
} Ops;

/* ---- devices and memory -------------------------------------------------------------------- */

typedef enum DeviceKind { DEVICE_CPU, DEVICE_CUDA } DeviceKind;

/* threads: CPU threads of this rank; 0: the cores this process may use / ranks that share them.
 * CUDA: the ranks of a host take its GPUs in turn. An error where there is no GPU, no driver or no
 * CUDA in this build. */
Device *device_open(DeviceKind kind, int threads, Error *err);
void device_close(Device *d);
const Ops *device_ops(const Device *d);
DeviceKind device_kind(const Device *d);
const char *device_describe(const Device *d); /* "AMD EPYC, 2 threads, oneDNN 2.6.3" */
int device_threads(const Device *d);

void *device_alloc(
    Device *d,
    size_t bytes); /* 64-byte aligned, uninitialised; dies naming the size when out of memory */
void device_free(Device *d, void *p);
/* Memory of the host that ops of the device work on too (a GPU over its bus), and the host itself
 * after device_sync: 64-byte aligned, uninitialised; in no account of the device. */
void *device_alloc_host(Device *d, size_t bytes);
void device_free_host(Device *d, void *p);
/* Memory of other processes on this machine. export: a handle of what device_alloc gave, for them;
 * false where devices of this kind have none. import: that memory here, to device_copy from; NULL
 * where this device does not reach it. Who owns it frees it when nobody has it any more. */
enum { DEVICE_HANDLE_BYTES = 64 };
bool device_export(Device *d, void *p, void *handle);
void *device_import(Device *d, const void *handle);
void device_unimport(Device *d, void *p);
void device_zero(Device *d, void *p, size_t bytes);
/* Queued; src_host is free when the call returns. */
void device_upload(Device *d, void *dst, const void *src_host, size_t bytes);
void device_download(Device *d, void *dst_host, const void *src,
                     size_t bytes); /* waits for the compute stream */
void device_copy(Device *d, void *dst, const void *src, size_t bytes); /* on the device, queued */
void device_sync(Device *d);
size_t device_bytes(const Device *d);      /* allocated now */
size_t device_peak_bytes(const Device *d); /* most since the last reset */
void device_reset_peak(Device *d);
bool device_takes_codes(const Device *d, DType compute); /* has linear for weights in codes */
size_t device_total_memory(
    const Device *d); /* bytes this rank may use: memory of the machine / ranks on it */

/* A step that is queued many times: between begin and end nothing runs, what is queued is kept with
 * its arguments, addresses and values alike, and a launch queues it all again, cheaply. Ops, copies
 * on the device and device_zero only, and collectives within comm_captured_bytes, if all ranks of
 * the Comm capture and launch the same. Run the same once before, uncaptured, so that scratch and
 * plans exist; what it names must live as long as it does. begin is false where the back end has no
 * graphs (the CPU): then ops run as ever, and the caller runs its step each time. */
typedef struct DeviceGraph DeviceGraph;
bool device_capture_begin(Device *d);
DeviceGraph *device_capture_end(Device *d);
void device_graph_launch(Device *d, DeviceGraph *g);
void device_graph_free(Device *d, DeviceGraph *g); /* NULL is fine */

/* Rates measured on this device now, for "utilisation of the peak": takes about half a second. */
typedef struct DeviceRates {
  double gemm_flops;
  double copy_bytes;
} DeviceRates; /* per second, this rank alone */
DeviceRates device_measure(Device *d);

double clock_seconds(void); /* monotonic */

/* ---- ranks ---------------------------------------------------------------------------------- */

/* Ranks form a grid of nodes x local. Rank (n, j) is local rank j of node n; ranks are numbered
 * n * local + j. Ranks per node come from the hosts that MPI reports, or from the caller. */
typedef struct Comm Comm;
typedef struct Grid {
  int rank, world;  /* this rank, all ranks */
  int nodes, local; /* nodes * local = world */
  int node, local_rank;
  Comm *all;                   /* every rank */
  Comm *intra;                 /* the ranks of this node, by local rank */
  Comm *inter;                 /* the ranks with this local rank, by node */
  Comm *dev_intra, *dev_inter; /* the same over device memory; grid_attach */
} Grid;

/* Starts MPI if a launcher (mpirun, srun) started this process, and sets die()'s rank and hook; a
 * process that no one launched is one rank, without MPI. grid_create: ranks_per_node 0: hosts
 * decide. Refuses unequal nodes with an error. */
int launch_init(int *argc, char ***argv, Error *err);
int launch_rank(void);
int launch_world(void);
/* Both count this rank, and are 1 before launch_init. */
int launch_host_rank(void);  /* this rank's number among them, from 0 */
int launch_host_ranks(void); /* ranks on this machine (real hosts, whatever grid the caller asks) */
int launch_core_ranks(void); /* of those, the ranks whose CPU affinity overlaps this one's: what the
                                cores of the affinity mask are shared by */
Grid *grid_create(int ranks_per_node, Error *err);
/* Makes dev_intra and dev_inter collectives over the memory of this device (NCCL, or through the
 * host where ranks share a GPU). On the CPU, and before, they are intra and inter themselves.
 * Collective, once for a grid. A device and its grid may be closed in either order. */
int grid_attach(Grid *g, Device *d, Error *err);
void grid_free(Grid *g);
void launch_finish(void);

typedef enum CollKind {
  COLL_ALL_GATHER,
  COLL_REDUCE_SCATTER,
  COLL_ALL_TO_ALL,
  COLL_ALL_REDUCE,
  COLL_BROADCAST,
  COLL_BARRIER,
  COLL_KINDS
} CollKind;
const char *coll_name(CollKind k);

/* Collectives over host memory (CPU-device memory is that), or over device memory for Comms of
 * grid_attach, which have all_gather, all_to_all, their comm_start_X, comm_start_work and _take
 * only. All ranks of the Comm call them in the same order with matching counts; any count, zero
 * included. Each is counted (bytes that this rank received from ranks of its own node / of other
 * nodes) and timed. A failure dies with rank, collective and cause. */
int comm_size(const Comm *c);
int comm_rank(const Comm *c);
/* recv = concatenation of every rank's block by rank; counts in bytes, [size]; send may lie in its
 * place in recv. */
void comm_all_gather(Comm *c, const void *send, void *recv, const size_t *bytes_of_rank);
/* recv[counts[me]] = sum over ranks, added in rank order in fp32, of block `me` of send (blocks by
 * rank). Deterministic. send is not changed. */
void comm_reduce_scatter_f32(Comm *c, const float *send, float *recv, const size_t *count_of_rank);
/* Block r of send goes to rank r; byte counts. */
void comm_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                     const size_t *recv_bytes);
void comm_all_reduce_f64(Comm *c, double *x, int n,
                         bool max); /* in place; sum in rank order, or max */
void comm_broadcast(Comm *c, void *data, size_t bytes, int root);
void comm_barrier(Comm *c);
/* Counts bytes that this rank took out of another's memory by itself (device_import). */
void comm_count_taken(Comm *c, CollKind kind, int from, size_t bytes);
/* The longest block between two ranks that a captured step (device_capture_begin) can have; 0: such
 * a step has no collectives of this Comm. The same on all ranks. */
size_t comm_captured_bytes(const Comm *c);
/* Agreement on errors of the outside world: rc < 0 on any rank makes it -1 on all, with the message
 * of the lowest such rank. Every rank must call it. */
int comm_agree(Comm *c, int rc, Error *err);

/* ---- collectives behind compute -------------------------------------------------------------
 *
 * comm_start_X is comm_X that returns at once, with a ticket; comm_wait waits until it is done.
 * Everything that is started in a chain runs one after another, in the order of the starts (of all
 * Comms together); waiting for a ticket waits for all before it too, of all chains. The collectives
 * above, and the making and freeing of grids, first wait for all that was started. Until
 * comm_queue_start, and always with one rank, a start does its work before it returns, and its
 * ticket is 0.
 *
 * - From start to wait the buffers belong to the collective: nobody writes what is sent, nobody
 *   touches what is received. Arrays of counts are copied and are free at once.
 * - All ranks start the same things in the same order. One thread of a rank starts and waits.
 * - A ticket is waited for once, or never when a later one is; waiting for 0 does nothing.
 *
 * Over host memory a thread of its own works the queue, and chains are one. With NCCL a start
 * enqueues on a communication stream, which waits for the compute stream as it stands at the start;
 * a ticket is an event, and a wait is the compute stream's: the host goes on. Between nodes there
 * are two such streams, which chains take by turns. Host and device have an order each.
 */
typedef uint64_t CommTicket;
CommTicket comm_start_all_gather(Comm *c, const void *send, void *recv,
                                 const size_t *bytes_of_rank);
CommTicket comm_start_reduce_scatter_f32(Comm *c, const float *send, float *recv,
                                         const size_t *count_of_rank);
CommTicket comm_start_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                                 const size_t *recv_bytes);
/* Compute in its place between collectives of c (the dequantize-sum-requantize between two hops).
 * Over host memory work(arg) is called beside the compute thread, so it wants few threads. Over
 * device memory it is called before the start returns, and the ops that it queues go to the
 * communication stream. It may use no Comm and not wait for the device. Its seconds are counted
 * under `kind`. arg and what it points to live until the wait. */
CommTicket comm_start_work(Comm *c, CollKind kind, void (*work)(void *arg), void *arg);
/* The same where ranks take blocks out of each other's memory (device_import): work is done when
 * all ranks have come to it, what they computed before their starts too, and the ticket is done
 * when that of all ranks is. Where comm_can_take, which says the same on all of them. */
CommTicket comm_start_take(Comm *c, CollKind kind, void (*work)(void *arg), void *arg);
bool comm_can_take(const Comm *c);
void comm_wait(CommTicket t);
/* What is started from here on needs nothing of what was started before, but through compute that
 * has waited for it: it may run beside that. All ranks say so at the same places. A network is idle
 * at both ends of every collective, unless another is under way. */
void comm_new_chain(void);

/* Starts and ends the queue's thread; nothing happens with one rank, or when that is so already. An
 * end waits for all that was started. */
void comm_queue_start(void);
void comm_queue_stop(void);
bool comm_queue_runs(void);

/* A collective of which nothing arrives for this long dies, naming itself, its group and the ranks
 * that are missing; with NCCL, one that is not done this long after it could start. 0, as at the
 * start of a process: waits for ever. */
void comm_set_timeout(double seconds);

typedef struct TrafficCount {
  uint64_t calls, intra_bytes, inter_bytes;
  double seconds;        /* exposed: the caller waited */
  double hidden_seconds; /* under way while the caller did something else */
} TrafficCount;
typedef struct Traffic {
  TrafficCount of[COLL_KINDS];
} Traffic;
/* Since the start, all Comms of this rank; differences give a phase's. What was started and is not
 * done is not in it yet; of a device's collectives the bytes are, and the seconds once compute was
 * told to wait for them. */
Traffic traffic_now(void);

#endif
