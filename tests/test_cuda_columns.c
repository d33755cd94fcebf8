/* join_columns on the GPU: the CPU's bits where nothing is added, and one rounding where it is;
 * more parts than one launch takes. */
#include "tests/twin.h"

enum { RANKS = 8, JOINED = 5, PARTS = RANKS * JOINED };

/* Columns of 8 ranks of 5 joined matrices; the last rank has none of two of them. */
static int64_t make_parts(ColumnPart *part, int64_t rows, int64_t width) {
  int64_t at = 0;
  for (int r = 0; r < RANKS; r++) {
    int64_t stride = 0, from = at;
    for (int j = 0; j < JOINED; j++) stride += r == RANKS - 1 && j < 2 ? 0 : width + j;
    for (int j = 0, to = 0; j < JOINED; j++) {
      int64_t own = r == RANKS - 1 && j < 2 ? 0 : width + j;
      part[r * JOINED + j] = (ColumnPart){from, stride, own, to + r * (width + j)};
      from += own;
      to += (int)(RANKS * (width + j) - (j < 2 ? width + j : 0));
    }
    at += rows * stride;
  }
  return at;
}

static void columns_agree(void **state) {
  (void)state;
  static const int64_t rows[] = {1, 3, 64, 65537}, widths[] = {1, 7, 128, 200};
  Twins *t = twins();
  for (int i = 0; i < 16; i++) {
    ColumnPart part[PARTS];
    int64_t n = rows[i % 4], width = n > 1000 ? 1 + i / 4 : widths[i / 4];
    if (test_is_watched() && n > 1000)
      continue; /* the same in two launches of millions of blocks */
    int64_t numel = make_parts(part, n, width);
    DType type = i % 2 ? DT_BF16 : DT_F32;
    Pair x = twin_random(type, 1, 1, 1, numel), y = twin_random(type, 2, 1, 2, n, numel / n);
    for (int add = 0; add < 2; add++) {
      t->cpu_ops->join_columns(t->cpu, PARTS, part, x.cpu, y.cpu, add);
      t->gpu_ops->join_columns(t->gpu, PARTS, part, x.gpu, y.gpu, add);
      twin_compare(add ? "columns added" : "columns", y, add ? 1.0 / 256 : 0);
    }
    twin_done();
  }
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(columns_agree)};
TEST_MAIN(tests)
