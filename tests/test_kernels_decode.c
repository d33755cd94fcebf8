/* What decoding adds to the ops, on the CPU: linear and its fronts against double precision,
 * weights in codes against the numbers that they stand for, rope_write against rope and kv_write,
 * rows that move on as the host would move them. */
#include "tests/kernels_test.h"

static void reference(const Linear *l, const float *x, int64_t m, double *y) {
  int64_t n = l->w_OK.dim[0], k = l->w_OK.dim[1];
  double *in = zeros(k);
  for (int64_t i = 0; i < m; i++) {
    const float *row = x + i * (l->front == FRONT_SWIGLU ? 2 * k : k);
    double squares = 0;
    for (int64_t j = 0; j < k; j++) squares += (double)row[j] * (double)row[j];
    for (int64_t j = 0; j < k; j++) {
      double v = (double)row[j];
      if (l->front == FRONT_RMSNORM)
        v *= (double)tensor_f32(l->norm_K)[j] / sqrt(squares / (double)k + (double)l->eps);
      if (l->front == FRONT_SWIGLU) v *= (double)row[k + j] / (1 + exp(-v));
      in[j] = v;
    }
    for (int64_t o = 0; o < n; o++) {
      double sum = l->bias_O.data ? (double)tensor_f32(l->bias_O)[o] : 0;
      for (int64_t j = 0; j < k; j++) sum += in[j] * (double)tensor_f32(l->w_OK)[o * k + j];
      y[i * n + o] = (l->add ? y[i * n + o] : 0) + sum;
    }
  }
  free(in);
}

static void linear_by_its_definition(void **state) {
  (void)state;
  enum { M = 5, N = 13, K = 48 };
  Device *d = open_cpu(2);
  for (int i = 0; i < 12; i++) {
    Front front = (Front)(i % 3);
    float *x = random_floats(1, (int64_t)M * 2 * K, 1), *w = random_floats(2, (int64_t)N * K, 1);
    float *norm = random_floats(3, K, 1), *bias = random_floats(4, N, 1);
    float *y = random_floats(5, (int64_t)M * N, 1), *room = filled_floats((int64_t)M * K, NAN);
    double *want = widen(y, (int64_t)M * N);
    Linear l = {.front = front, .norm_K = f32_1d(norm, K), .eps = 1e-5F, .w_OK = f32_2d(w, N, K)};
    l.front_MK = f32_2d(room, M, K);
    l.add = i / 3 % 2 == 1;
    if (i >= 6) l.bias_O = f32_1d(bias, N);
    reference(&l, x, M, want);
    device_ops(d)->linear(d, l, f32_2d(x, M, front == FRONT_SWIGLU ? 2 * K : K), f32_2d(y, M, N));
    assert_close("linear", y, want, (int64_t)M * N, 2e-6, 1); /* sums of 48 terms */
    free(x);
    free(w);
    free(norm);
    free(bias);
    free(y);
    free(room);
    free(want);
  }
  device_close(d);
}

/* By few rows and by many; of W what several pieces of a cache hold, and a part of one. */
static void codes_stand_for_numbers(void **state) {
  (void)state;
  enum { K = 144 };
  static const WireFormat formats[] = {{WIRE_INT8, 64, DT_F32}, {WIRE_FP8, 128, DT_BF16}};
  static const int64_t rows[] = {1, 3, 24, 25, 60, 128, 129}, outputs[] = {0, 1, 10, 500, 675};
  Device *d = open_cpu(2);
  const Ops *op = device_ops(d);
  for (int i = 0; i < 2 * 7 * 5; i++) {
    const int64_t M = rows[i / 2 % 7], N = outputs[i / 14];
    WireSpan span = {K, 0, N * K};
    float *w = random_floats(1, span.count, 1), *x = random_floats(2, M * K, 1);
    float *y = random_floats(3, M * N, 1), *want = random_floats(3, M * N, 1);
    const WireFormat f = formats[i % 2];
    bool add = i % 3 == 0;
    WireData codes = {mem_alloc(wire_scale_bytes(f, span) + 1, 1),
                      mem_alloc(wire_payload_bytes(f, span) + 1, 1), 1, 0};
    WirePart part = {.span = span, .x = f32_1d(w, span.count), .from = codes, .to = codes};
    op->quantize(d, f, 1, &part);
    op->dequantize(d, f, 1, &part, false); /* w becomes what arrives */
    op->gemm(d, GEMM_NT, 1, f32_2d(x, M, K), f32_2d(w, N, K), add ? 1 : 0, f32_2d(want, M, N));
    Linear l = {.w_OK = f32_2d(NULL, N, K), .format = f, .codes = codes, .add = add};
    op->linear(d, l, f32_2d(x, M, K), f32_2d(y, M, N));
    assert_same_bits("linear of codes", y, want, M * N);
    free(y);
    free(want);
    free(w);
    free(x);
    free(codes.scales);
    free(codes.payload);
  }
  device_close(d);
}

/* Three ranks' columns of two joined matrices, and one that has none. */
static void columns_side_by_side(void **state) {
  (void)state;
  enum { ROWS = 7, PARTS = 7, WIDTH = 13 };
  static const ColumnPart parts[PARTS] = {{0, 5, 3, 0},         {3, 5, 2, 8},
                                          {5 * ROWS, 4, 3, 3},  {5 * ROWS + 3, 4, 1, 10},
                                          {9 * ROWS, 4, 2, 6},  {9 * ROWS + 2, 4, 2, 11},
                                          {13 * ROWS, 0, 0, 13}};
  Device *d = open_cpu(2);
  float *x = random_floats(1, 13 * ROWS, 1), *y = random_floats(2, WIDTH * ROWS, 1);
  float *want = random_floats(2, WIDTH * ROWS, 1);
  Tensor x_1 = f32_1d(x, 13 * ROWS), y_NC = f32_2d(y, ROWS, WIDTH);
  for (int add = 1; add >= 0; add--) {
    for (int p = 0; p < PARTS; p++)
      for (int64_t i = 0; i < ROWS; i++)
        for (int64_t c = 0; c < parts[p].width; c++) {
          float *to = want + i * WIDTH + parts[p].to + c;
          float from = x[parts[p].from + i * parts[p].stride + c];
          *to = add ? *to + from : from;
        }
    device_ops(d)->join_columns(d, PARTS, parts, x_1, y_NC, add);
    assert_same_bits("columns", y, want, (int64_t)WIDTH * ROWS);
  }
  free(x);
  free(y);
  free(want);
  device_close(d);
}

/* A row without a slot is rotated and written nowhere; decoding a sequence of no tokens gives 0. */
static void rope_write_is_both(void **state) {
  (void)state;
  enum { N = 3, H = 4, D = 8, Q = 6 * D, PAGE = 2, PAGES = 3, FLOATS = PAGES * PAGE * D };
  const AttnShape s = {H, 1, D, 0.3F, 0};
  int32_t positions[N] = {0, 3, 1}, slots[N] = {4, -1, 5}, kept[2] = {4, 5}, table[2] = {2, 0};
  int32_t lens[2] = {2, 0};
  Device *d = open_cpu(1);
  const Ops *op = device_ops(d);
  float *qkv = random_floats(1, N * Q, 1), *want = random_floats(1, N * Q, 1);
  float *cos = random_floats(2, 4 * D / 2, 1), *sin = random_floats(3, 4 * D / 2, 1);
  float pages[4][FLOATS], rows[2 * Q], out[2 * H * D];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < FLOATS; j++) pages[i][j] = NAN;
  Tensor at[4];
  for (int i = 0; i < 4; i++) at[i] = (Tensor){pages[i], DT_F32, 4, {PAGES, PAGE, 1, D}};
  op->rope_write(d, f32_2d(qkv, N, Q), i32_1d(positions, N), f32_2d(cos, 4, D / 2),
                 f32_2d(sin, 4, D / 2), s, i32_1d(slots, N), at[0], at[1]);
  op->rope(d, f32_2d(want, N, Q), i32_1d(positions, N), f32_2d(cos, 4, D / 2),
           f32_2d(sin, 4, D / 2), s, false);
  assert_same_bits("qkv", qkv, want, (int64_t)N * Q);
  memcpy(rows, want, sizeof(float) * Q);
  memcpy(rows + Q, want + 2 * (ptrdiff_t)Q, sizeof(float) * Q);
  op->kv_write(d, f32_2d(rows, 2, Q), i32_1d(kept, 2), s, at[2], at[3]);
  assert_memory_equal(pages[0], pages[2], sizeof pages[0]);
  assert_memory_equal(pages[1], pages[3], sizeof pages[1]);
  op->attention_decode(d, f32_2d(rows, 2, Q), tensor_2d(table, DT_I32, 2, 1), i32_1d(lens, 2), s,
                       at[0], at[1], f32_2d(out, 2, H * D));
  for (int j = 0; j < H * D; j++) {
    assert_true(isfinite(out[j]));
    assert_true(fabsf(out[H * D + j]) <= 0);
  }
  free(qkv);
  free(want);
  free(cos);
  free(sin);
  device_close(d);
}

/* Against the loop that the host would run. */
static void rows_move_on(void **state) {
  (void)state;
  enum { B = 4, PAGE = 3, WIDTH = 4, STEPS = 6 };
  const uint64_t seed = 99;
  int32_t token[B] = {0}, position[B] = {0}, len[B] = {1, 4, 0, 7}, slot[B] = {0, 0, -1, 0};
  int32_t end[B] = {20, 6, 9, 12}, drawn[B], step = 0, history[STEPS][B], table[B * WIDTH];
  int32_t first_len[B];
  int64_t stream[B] = {5, -6, 7, 8};
  float u[B] = {0}, logprob[B], kept[STEPS][B];
  Device *d = open_cpu(1);
  rng_permute(1, 2, table, B * WIDTH);
  memcpy(first_len, len, sizeof len);
  DecodeRows r = {PAGE,
                  3,
                  seed,
                  i32_1d(token, B),
                  i32_1d(position, B),
                  i32_1d(len, B),
                  i32_1d(slot, B),
                  tensor_2d(table, DT_I32, B, WIDTH),
                  i32_1d(end, B),
                  tensor_1d(stream, DT_I64, B),
                  f32_1d(u, B),
                  i32_1d(drawn, B),
                  f32_1d(logprob, B),
                  i32_1d(&step, 1),
                  tensor_2d(history, DT_I32, STEPS, B),
                  f32_2d(kept[0], STEPS, B)};
  for (int t = 0; t < STEPS; t++) {
    for (int b = 0; b < B; b++) {
      drawn[b] = 100 * t + b;
      logprob[b] = -(float)t;
    }
    device_ops(d)->decode_advance(d, r);
    assert_int_equal(step, t + 1);
    for (int b = 0; b < B; b++) {
      int32_t now = first_len[b] + t + 1;           /* tokens, the drawn one included */
      bool was = first_len[b] > 0 && now <= end[b]; /* not inert before this step */
      assert_int_equal(history[t][b], was ? drawn[b] : -1);
      if (!was || now >= end[b]) {
        assert_int_equal(len[b], 0);
        assert_int_equal(slot[b], -1);
        continue;
      }
      float want = (float)rng_uniform(seed, (uint64_t)stream[b], (uint64_t)now);
      assert_int_equal(len[b], now);
      assert_int_equal(token[b], drawn[b]);
      assert_int_equal(position[b], 3 + now - 1);
      assert_int_equal(slot[b], table[b * WIDTH + (now - 1) / PAGE] * PAGE + (now - 1) % PAGE);
      assert_true(fabsf(u[b] - want) <= 0);
      assert_true(fabsf(kept[t][b] + (float)t) <= 0);
    }
  }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(linear_by_its_definition),
    cmocka_unit_test(codes_stand_for_numbers),
    cmocka_unit_test(columns_side_by_side),
    cmocka_unit_test(rope_write_is_both),
    cmocka_unit_test(rows_move_on),
};
TEST_MAIN(tests)
