/* Norms, rotary embedding, SwiGLU, activations and biases on the GPU against the CPU.
 *
 * Bounds, relative to the largest value. F32: sums in another order, special functions within a few
 * ulp: 1e-5. BF16: half of its spacing, 2^-8, for the output's rounding; where x + delta is rounded
 * before it is normalized, twice that and a little. Gradients of weights are F32 of the same
 * inputs: 1e-5. */
#include "tests/bandwidth.h"

static const DType types[] = {DT_F32, DT_BF16};
static double bound(DType t) { return t == DT_F32 ? 1e-5 : 1.0 / 256; }
static double bound_twice(DType t) { return t == DT_F32 ? 1e-5 : 1.0 / 120; }

static const char *name_of(const char *op, DType t, int64_t n, int64_t c) {
  static char name[96];
  snprintf(name, sizeof name, "%s %s [%lld, %lld]", op, dtype_name(t), (long long)n, (long long)c);
  return name;
}

typedef struct Size {
  int64_t n, c;
} Size;
/* One access, a warp's, a block's; every number of accesses per thread of the fast paths, and past
 * them; widths that are not whole accesses; fewer and more rows than blocks. */
static const Size sizes[] = {{1, 8},     {3, 64},    {3000, 128}, {7, 2048},   {700, 2048},
                             {65, 4096}, {33, 8192}, {5, 16384},  {3, 32768},  {2, 65536},
                             {17, 5},    {40, 770},  {9, 1},      {300, 2050}, {0, 64}};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

/* ---- RMSNorm and LayerNorm ---- */

static void check_norm_fwd(DType t, Size s, bool layer, bool with_delta, int64_t shift) {
  Twins *w = twins();
  if (twin_leaves_out(5, 5)) return;
  int64_t n = s.n, c = s.c;
  bool rounded = with_delta && t == DT_BF16;
  Pair x = twin_rows(twin_random(t, 1, 1, 1, n * c + shift), shift, n, c);
  Pair delta = with_delta ? twin_random(t, 2, 1, 2, n, c) : twin_absent();
  Pair weight = twin_random(t, 3, 1, 1, c), bias = twin_random(t, 4, 1, 1, c);
  Pair y = twin_unwritten(t, 2, n, c), mean = twin_unwritten(DT_F32, 1, n),
       rstd = twin_unwritten(DT_F32, 1, n);
  if (layer) {
    w->cpu_ops->layernorm_fwd(w->cpu, x.cpu, delta.cpu, weight.cpu, bias.cpu, 1e-5F, y.cpu,
                              mean.cpu, rstd.cpu);
    w->gpu_ops->layernorm_fwd(w->gpu, x.gpu, delta.gpu, weight.gpu, bias.gpu, 1e-5F, y.gpu,
                              mean.gpu, rstd.gpu);
    /* A mean nearly cancels, and the rounding of x + delta with it. */
    twin_compare(name_of("layernorm mean", t, n, c), mean, rounded ? 0.1 : 1e-5);
  } else {
    w->cpu_ops->rmsnorm_fwd(w->cpu, x.cpu, delta.cpu, weight.cpu, 1e-5F, y.cpu, rstd.cpu);
    w->gpu_ops->rmsnorm_fwd(w->gpu, x.gpu, delta.gpu, weight.gpu, 1e-5F, y.gpu, rstd.gpu);
  }
  const char *op = layer ? "layernorm" : "rmsnorm";
  /* Of a few elements x - mean nearly cancels. */
  bool cancels = rounded && layer && c < 8;
  twin_compare(name_of(op, t, n, c), y, cancels ? 0.1 : with_delta ? bound_twice(t) : bound(t));
  if (with_delta) twin_compare(name_of("x + delta", t, n, c), x, bound(t));
  twin_compare(name_of("rstd", t, n, c), rstd, cancels ? 0.1 : rounded ? bound(t) : 1e-5);
  twin_done();
}

static void norms_forward(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_SIZES; i++)
      for (int layer = 0; layer < 2; layer++) {
        /* A LayerNorm of one element divides nothing by nothing and eps. */
        if (layer && sizes[i].c == 1) continue;
        check_norm_fwd(types[k], sizes[i], layer, false, 0);
        check_norm_fwd(types[k], sizes[i], layer, true, i % 2);
      }
}

/* Only the residual add; only the statistics. */
static void norms_without_outputs(void **state) {
  (void)state;
  Twins *w = twins();
  for (int k = 0; k < 2; k++) {
    DType t = types[k];
    Pair x = twin_random(t, 1, 1, 2, 50, 300), delta = twin_random(t, 2, 1, 2, 50, 300);
    Pair rstd = twin_unwritten(DT_F32, 1, 50), none = twin_absent();
    w->cpu_ops->rmsnorm_fwd(w->cpu, x.cpu, delta.cpu, none.cpu, 1e-5F, none.cpu, none.cpu);
    w->gpu_ops->rmsnorm_fwd(w->gpu, x.gpu, delta.gpu, none.gpu, 1e-5F, none.gpu, none.gpu);
    twin_compare("residual add", x, bound(t));
    w->cpu_ops->rmsnorm_fwd(w->cpu, x.cpu, none.cpu, none.cpu, 1e-5F, none.cpu, rstd.cpu);
    w->gpu_ops->rmsnorm_fwd(w->gpu, x.gpu, none.gpu, none.gpu, 1e-5F, none.gpu, rstd.gpu);
    twin_compare("statistics", rstd, bound(t)); /* of an x that was rounded */
  }
  twin_done();
}

static void run_norm_bwd(Device *d, const Ops *op, bool layer, Tensor dy, Tensor x, Tensor w,
                         Tensor mean, Tensor rstd, Tensor dx, Tensor dw, Tensor db) {
  if (layer)
    op->layernorm_bwd(d, dy, x, w, mean, rstd, dx, dw, db);
  else
    op->rmsnorm_bwd(d, dy, x, w, rstd, dx, dw);
}

static void check_norm_bwd(DType t, Size s, bool layer, int64_t shift) {
  Twins *w = twins();
  if (test_is_watched_closely() ? s.n > 65 || s.c > 8192 : twin_leaves_out(5, 5)) return;
  int64_t n = s.n, c = s.c;
  Pair dy = twin_random(t, 1, 1, 2, n, c), x = twin_random(t, 2, 1, 2, n, c);
  Pair weight = twin_random(t, 3, 1, 1, c);
  Pair mean = twin_random(DT_F32, 4, 0.1F, 1, n), rstd = twin_random(DT_F32, 5, 1, 1, n);
  Pair dx[2], dw[2], db[2]; /* the second for the same bits again */
  for (int i = 0; i < 2; i++) {
    dx[i] = twin_rows(twin_random(t, 6, 1, 1, n * c + shift), shift, n, c);
    dw[i] = twin_random(DT_F32, 7, 1, 1, c);
    db[i] = twin_random(DT_F32, 8, 1, 1, c);
    run_norm_bwd(w->gpu, w->gpu_ops, layer, dy.gpu, x.gpu, weight.gpu, mean.gpu, rstd.gpu,
                 dx[i].gpu, dw[i].gpu, db[i].gpu);
  }
  run_norm_bwd(w->cpu, w->cpu_ops, layer, dy.cpu, x.cpu, weight.cpu, mean.cpu, rstd.cpu, dx[0].cpu,
               dw[0].cpu, db[0].cpu);
  const char *op = layer ? "layernorm_bwd" : "rmsnorm_bwd";
  twin_compare(name_of(op, t, n, c), dx[0], bound(t));
  twin_compare(name_of("its dw", t, n, c), dw[0], 1e-5);
  if (layer) twin_compare(name_of("its db", t, n, c), db[0], 1e-5);
  twin_same_bits(op, dx[0], dx[1]);
  twin_same_bits(op, dw[0], dw[1]);
  if (layer) twin_same_bits(op, db[0], db[1]);
  twin_done();
}

static void norms_backward(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_SIZES; i++)
      for (int layer = 0; layer < 2; layer++) {
        check_norm_bwd(types[k], sizes[i], layer, 0);
        if (i % 4 == 0) check_norm_bwd(types[k], sizes[i], layer, 1);
      }
}

/* ---- heads ---- */

typedef struct Heads {
  int64_t n;
  int h, k, d, pairs;
} Heads;
/* Llama 1.1B, Qwen3, one lane of a head more than a power of two, odd ones, one above 32 lanes. */
static const Heads heads[] = {{300, 32, 4, 64, 32}, {100, 16, 8, 128, 64}, {37, 6, 2, 80, 20},
                              {5, 3, 1, 33, 16},    {9, 2, 2, 320, 80},    {11, 2, 1, 256, 128},
                              {1, 1, 1, 8, 4},      {0, 2, 1, 64, 32},     {50, 4, 4, 96, 7}};
enum { N_HEADS = sizeof heads / sizeof heads[0] };

static void check_qk_norm(DType t, Heads s) {
  Twins *w = twins();
  int64_t n = s.n, q = (int64_t)(s.h + 2 * s.k) * s.d;
  AttnShape a = {s.h, s.k, s.d, 1, 0};
  Pair raw = twin_random(t, 1, 1, 2, n, q), y = twin_unwritten(t, 2, n, q);
  Pair wq = twin_random(t, 2, 1, 1, s.d), wk = twin_random(t, 3, 1, 1, s.d);
  Pair rstd = twin_unwritten(DT_F32, 2, n, s.h + s.k), none = twin_absent();
  w->cpu_ops->qk_norm_fwd(w->cpu, raw.cpu, wq.cpu, wk.cpu, 1e-5F, a, y.cpu, rstd.cpu);
  w->gpu_ops->qk_norm_fwd(w->gpu, raw.gpu, wq.gpu, wk.gpu, 1e-5F, a, y.gpu, rstd.gpu);
  twin_compare(name_of("qk_norm", t, n, q), y, bound(t));
  twin_compare(name_of("its rstd", t, n, q), rstd, 1e-5);
  w->gpu_ops->qk_norm_fwd(w->gpu, raw.gpu, wq.gpu, wk.gpu, 1e-5F, a, y.gpu, none.gpu);
  twin_compare(name_of("qk_norm alone", t, n, q), y, bound(t));
  Pair dy[2], dwq[2], dwk[2];
  for (int i = 0; i < 2; i++) {
    dy[i] = twin_random(t, 4, 1, 2, n, q);
    dwq[i] = twin_random(DT_F32, 5, 1, 1, s.d);
    dwk[i] = twin_random(DT_F32, 6, 1, 1, s.d);
    w->gpu_ops->qk_norm_bwd(w->gpu, raw.gpu, wq.gpu, wk.gpu, rstd.gpu, a, dy[i].gpu, dwq[i].gpu,
                            dwk[i].gpu);
  }
  w->cpu_ops->qk_norm_bwd(w->cpu, raw.cpu, wq.cpu, wk.cpu, rstd.cpu, a, dy[0].cpu, dwq[0].cpu,
                          dwk[0].cpu);
  twin_compare(name_of("qk_norm_bwd", t, n, q), dy[0], bound(t));
  twin_compare(name_of("its dwq", t, n, q), dwq[0], 1e-5);
  twin_compare(name_of("its dwk", t, n, q), dwk[0], 1e-5);
  twin_same_bits("qk_norm_bwd", dy[0], dy[1]);
  twin_same_bits("its dwq", dwq[0], dwq[1]);
  twin_same_bits("its dwk", dwk[0], dwk[1]);
  twin_done();
}

static void qk_norms(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_HEADS; i++) check_qk_norm(types[k], heads[i]);
}

static void check_rope(DType t, Heads s, bool inverse) {
  Twins *w = twins();
  if (twin_leaves_out(5, 10)) return;
  int64_t n = s.n, q = (int64_t)(s.h + 2 * s.k) * s.d, p = 50;
  AttnShape a = {s.h, s.k, s.d, 1, 0};
  Pair x = twin_random(t, 1, 1, 2, n, q), positions = twin_random_ints(2, n, (int32_t)p);
  Pair cosine = twin_random(DT_F32, 3, 1, 2, p, s.pairs);
  Pair sine = twin_random(DT_F32, 4, 1, 2, p, s.pairs);
  w->cpu_ops->rope(w->cpu, x.cpu, positions.cpu, cosine.cpu, sine.cpu, a, inverse);
  w->gpu_ops->rope(w->gpu, x.gpu, positions.gpu, cosine.gpu, sine.gpu, a, inverse);
  twin_compare(name_of(inverse ? "rope inverse" : "rope", t, n, q), x, bound(t));
  twin_done();
}

static void ropes(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_HEADS; i++)
      for (int inverse = 0; inverse < 2; inverse++) check_rope(types[k], heads[i], inverse);
}

/* ---- MLPs and biases ---- */

static void check_swiglu(DType t, Size s, int64_t shift) {
  Twins *w = twins();
  if (twin_leaves_out(5, 10)) return;
  int64_t n = s.n, f = s.c;
  Pair gu = twin_rows(twin_random(t, 1, 3, 1, 2 * n * f + shift), shift, n, 2 * f);
  Pair y = twin_unwritten(t, 2, n, f), dy = twin_random(t, 2, 1, 2, n, f);
  Pair dgu = twin_unwritten(t, 2, n, 2 * f);
  if (n * f > 4) { /* gates far outside, and what is not a number */
    float *g = tensor_f32(gu.cpu);
    float odd[4] = {200, -200, NAN, INFINITY};
    char typed[16];
    memcpy(g, odd, sizeof odd);
    if (convert_from_f32(odd, typed, t, 4)) die("F32 or BF16");
    device_upload(w->gpu, gu.gpu.data, typed, 4 * dtype_size(t));
  }
  w->cpu_ops->swiglu_fwd(w->cpu, gu.cpu, y.cpu);
  w->gpu_ops->swiglu_fwd(w->gpu, gu.gpu, y.gpu);
  twin_compare(name_of("swiglu", t, n, f), y, bound(t));
  Pair again = twin_unwritten(t, 2, n, f);
  w->cpu_ops->swiglu_bwd(w->cpu, dy.cpu, gu.cpu, dgu.cpu, again.cpu);
  w->gpu_ops->swiglu_bwd(w->gpu, dy.gpu, gu.gpu, dgu.gpu, again.gpu);
  twin_same_bits(name_of("swiglu once more", t, n, f), y, again);
  twin_compare(name_of("swiglu_bwd", t, n, f), dgu, bound(t));
  w->cpu_ops->swiglu_bwd(w->cpu, dy.cpu, gu.cpu, gu.cpu, (Tensor){0});
  w->gpu_ops->swiglu_bwd(w->gpu, dy.gpu, gu.gpu, gu.gpu, (Tensor){0});
  twin_same_bits(name_of("swiglu_bwd in place", t, n, f), dgu, gu);
  twin_done();
}

static void swiglus(void **state) {
  (void)state;
  static const Size of[] = {{1, 8}, {3, 5632}, {70, 11008}, {9, 17}, {40, 770}, {0, 8}, {1, 3}};
  for (int k = 0; k < 2; k++)
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
      check_swiglu(types[k], of[i], 0);
      check_swiglu(types[k], of[i], 1);
    }
}

static void check_activation(DType t, Activation kind, Size s, int64_t shift) {
  Twins *w = twins();
  if (twin_leaves_out(5, 10)) return;
  int64_t n = s.n, f = s.c;
  Pair x = twin_rows(twin_random(t, 1, 3, 1, n * f + shift), shift, n, f);
  Pair dy = twin_rows(twin_random(t, 2, 1, 1, n * f + shift), shift, n, f);
  Pair y = twin_rows(twin_unwritten(t, 1, n * f + shift), shift, n, f);
  Pair dx = twin_unwritten(t, 2, n, f); /* out of step with dy and x */
  w->cpu_ops->act_fwd(w->cpu, kind, x.cpu, y.cpu);
  w->gpu_ops->act_fwd(w->gpu, kind, x.gpu, y.gpu);
  twin_compare(name_of("activation", t, n, f), y, bound(t));
  w->cpu_ops->act_bwd(w->cpu, kind, dy.cpu, x.cpu, dx.cpu);
  w->gpu_ops->act_bwd(w->gpu, kind, dy.gpu, x.gpu, dx.gpu);
  twin_compare(name_of("activation_bwd", t, n, f), dx, bound(t));
  twin_done();
}

static void activations(void **state) {
  (void)state;
  static const Size of[] = {{1, 1}, {3, 5}, {40, 770}, {64, 4096}, {0, 8}};
  static const Activation kinds[] = {ACT_RELU, ACT_GELU, ACT_GELU_TANH};
  for (int k = 0; k < 2; k++)
    for (int a = 0; a < 3; a++)
      for (size_t i = 0; i < sizeof of / sizeof of[0]; i++)
        for (int64_t shift = 0; shift < 2; shift++)
          check_activation(types[k], kinds[a], of[i], 3 * shift);
}

static void check_bias(DType t, Size s) {
  Twins *w = twins();
  if (twin_leaves_out(5, 10)) return;
  Pair x = twin_random(t, 1, 1, 2, s.n, s.c), b = twin_random(t, 2, 1, 1, s.c);
  w->cpu_ops->bias_add(w->cpu, x.cpu, b.cpu);
  w->gpu_ops->bias_add(w->gpu, x.gpu, b.gpu);
  twin_compare(name_of("bias_add", t, s.n, s.c), x, bound(t));
  Pair dy = twin_random(t, 3, 1, 2, s.n, s.c), db[2];
  for (int i = 0; i < 2; i++) {
    db[i] = twin_random(DT_F32, 4, 1, 1, s.c);
    w->gpu_ops->bias_grad(w->gpu, dy.gpu, db[i].gpu);
  }
  w->cpu_ops->bias_grad(w->cpu, dy.cpu, db[0].cpu);
  twin_compare(name_of("bias_grad", t, s.n, s.c), db[0], 1e-5);
  twin_same_bits("bias_grad", db[0], db[1]);
  twin_done();
}

static void biases(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_SIZES; i++) check_bias(types[k], sizes[i]);
}

/* ---- speed: 16384 tokens ---- */

typedef struct Big {
  Tensor a, b, c, w, bias, f32, f32_too, dw, db, cosine, sine, positions;
  AttnShape s;
  bool delta;
} Big;

static const Tensor absent;
static void run_rmsnorm(void *p) {
  Big *x = p;
  twin_state.gpu_ops->rmsnorm_fwd(twin_state.gpu, x->a, x->delta ? x->b : absent, x->w, 1e-5F, x->c,
                                  x->f32);
}
static void run_rmsnorm_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->rmsnorm_bwd(twin_state.gpu, x->a, x->b, x->w, x->f32, x->c, x->dw);
}
static void run_layernorm(void *p) {
  Big *x = p;
  twin_state.gpu_ops->layernorm_fwd(twin_state.gpu, x->a, x->b, x->w, x->bias, 1e-5F, x->c, x->f32,
                                    x->f32_too);
}
static void run_layernorm_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->layernorm_bwd(twin_state.gpu, x->a, x->b, x->w, x->f32_too, x->f32, x->c,
                                    x->dw, x->db);
}
static void run_bias_add(void *p) {
  Big *x = p;
  twin_state.gpu_ops->bias_add(twin_state.gpu, x->a, x->bias);
}
static void run_bias_grad(void *p) {
  Big *x = p;
  twin_state.gpu_ops->bias_grad(twin_state.gpu, x->a, x->db);
}
static void run_swiglu(void *p) {
  Big *x = p;
  twin_state.gpu_ops->swiglu_fwd(twin_state.gpu, x->b, x->a);
}
static void run_swiglu_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->swiglu_bwd(twin_state.gpu, x->a, x->b, x->c, (Tensor){0});
}
static void run_gelu(void *p) {
  Big *x = p;
  twin_state.gpu_ops->act_fwd(twin_state.gpu, ACT_GELU, x->b, x->c);
}
static void run_gelu_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->act_bwd(twin_state.gpu, ACT_GELU, x->a, x->b, x->c);
}
static void run_gelu_tanh_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->act_bwd(twin_state.gpu, ACT_GELU_TANH, x->a, x->b, x->c);
}
static void run_rope(void *p) {
  Big *x = p;
  twin_state.gpu_ops->rope(twin_state.gpu, x->a, x->positions, x->cosine, x->sine, x->s, false);
}
static void run_qk_norm(void *p) {
  Big *x = p;
  twin_state.gpu_ops->qk_norm_fwd(twin_state.gpu, x->a, x->w, x->bias, 1e-5F, x->s, x->b, x->f32);
}
static void run_qk_norm_bwd(void *p) {
  Big *x = p;
  twin_state.gpu_ops->qk_norm_bwd(twin_state.gpu, x->a, x->w, x->bias, x->f32, x->s, x->b, x->dw,
                                  x->db);
}

static void time_rows(DType t, int64_t c) {
  const int64_t n = 16384;
  double pass = (double)(n * c) * (double)dtype_size(t);
  Big x = {.a = big_random(t, 1, 2, n, c),
           .b = big_random(t, 1, 2, n, c),
           .c = big_random(t, 1, 2, n, c),
           .w = big_random(t, 1, 1, c),
           .bias = big_random(t, 1, 1, c),
           .f32 = big_random(DT_F32, 1, 1, n),
           .f32_too = big_random(DT_F32, 1, 1, n),
           .dw = big_random(DT_F32, 1, 1, c),
           .db = big_random(DT_F32, 1, 1, c)};
  bandwidth(name_of("rmsnorm", t, n, c), run_rmsnorm, &x, 2 * pass);
  x.delta = true;
  bandwidth(name_of("rmsnorm with residual", t, n, c), run_rmsnorm, &x, 4 * pass);
  bandwidth(name_of("rmsnorm_bwd", t, n, c), run_rmsnorm_bwd, &x, 4 * pass);
  bandwidth(name_of("layernorm with residual", t, n, c), run_layernorm, &x, 4 * pass);
  bandwidth(name_of("layernorm_bwd", t, n, c), run_layernorm_bwd, &x, 4 * pass);
  bandwidth(name_of("bias_add", t, n, c), run_bias_add, &x, 2 * pass);
  bandwidth(name_of("bias_grad", t, n, c), run_bias_grad, &x, pass);
  big_free();
}

static void time_mlp(DType t, int64_t f) {
  const int64_t n = 16384;
  double pass = (double)(n * f) * (double)dtype_size(t);
  Big x = {.a = big_random(t, 1, 2, n, f),
           .b = big_random(t, 1, 2, n, 2 * f),
           .c = big_random(t, 1, 2, n, 2 * f)};
  bandwidth(name_of("swiglu", t, n, f), run_swiglu, &x, 3 * pass);
  bandwidth(name_of("swiglu_bwd", t, n, f), run_swiglu_bwd, &x, 5 * pass);
  x.b.dim[1] = x.c.dim[1] = f;
  bandwidth(name_of("gelu", t, n, f), run_gelu, &x, 2 * pass);
  bandwidth(name_of("gelu_bwd", t, n, f), run_gelu_bwd, &x, 3 * pass);
  bandwidth(name_of("gelu_tanh_bwd", t, n, f), run_gelu_tanh_bwd, &x, 3 * pass);
  big_free();
}

static void time_heads(DType t, AttnShape s) {
  const int64_t n = 16384, p = 2048;
  int64_t q = (int64_t)(s.n_heads + 2 * s.n_kv_heads) * s.head_dim;
  int64_t turned = (int64_t)(s.n_heads + s.n_kv_heads) * s.head_dim;
  int32_t *at = mem_alloc((size_t)n, sizeof *at);
  for (int64_t i = 0; i < n; i++) at[i] = (int32_t)(i % p);
  Big x = {.a = big_random(t, 1, 2, n, q),
           .b = big_random(t, 1, 2, n, q),
           .w = big_random(t, 1, 1, s.head_dim),
           .bias = big_random(t, 1, 1, s.head_dim),
           .f32 = big_random(DT_F32, 1, 2, n, s.n_heads + s.n_kv_heads),
           .dw = big_random(DT_F32, 1, 1, s.head_dim),
           .db = big_random(DT_F32, 1, 1, s.head_dim),
           .cosine = big_random(DT_F32, 1, 2, p, s.head_dim / 2),
           .sine = big_random(DT_F32, 1, 2, p, s.head_dim / 2),
           .positions = big_ints(at, n),
           .s = s};
  free(at);
  double size = (double)n * (double)dtype_size(t);
  bandwidth(name_of("rope", t, n, q), run_rope, &x, 2 * size * (double)turned);
  bandwidth(name_of("qk_norm", t, n, q), run_qk_norm, &x, 2 * size * (double)q);
  bandwidth(name_of("qk_norm_bwd", t, n, q), run_qk_norm_bwd, &x, 3 * size * (double)turned);
  big_free();
}

static void speed(void **state) {
  (void)state;
  twins();
  if (test_is_watched()) skip();
  time_rows(DT_BF16, 2048);
  time_rows(DT_BF16, 4096);
  time_rows(DT_F32, 2048);
  time_mlp(DT_BF16, 5632);
  time_mlp(DT_BF16, 11008);
  time_mlp(DT_F32, 5632);
  time_heads(DT_BF16, (AttnShape){32, 4, 64, 1, 0});
  time_heads(DT_BF16, (AttnShape){32, 8, 128, 1, 0});
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(norms_forward),  cmocka_unit_test(norms_without_outputs),
    cmocka_unit_test(norms_backward), cmocka_unit_test(qk_norms),
    cmocka_unit_test(ropes),          cmocka_unit_test(swiglus),
    cmocka_unit_test(activations),    cmocka_unit_test(biases),
    cmocka_unit_test(speed),
};
TEST_MAIN(tests)
