/* core/arena.h: alignment, nesting, growth, and that every block goes back. */
#include "core/arena.h"

#include "core/error.h"
#include "tests/test.h"

typedef struct Heap {
  int live, taken;
} Heap;

static void *heap_alloc(void *ctx, size_t bytes) {
  Heap *h = ctx;
  h->live++;
  h->taken++;
  void *p = aligned_alloc(64, bytes);
  if (!p) die("out of memory");
  return p;
}

static void heap_free(void *ctx, void *p) {
  Heap *h = ctx;
  h->live--;
  free(p);
}

static void pieces_are_apart_and_aligned(void **state) {
  (void)state;
  Heap h = {0, 0};
  Arena *a = arena_create(&h, heap_alloc, heap_free);
  enum { N = 400 };
  unsigned char *p[N];
  size_t size[N];
  for (int i = 0; i < N; i++) { /* over several blocks */
    size[i] = (size_t)i * 97 % 20011;
    p[i] = arena_push(a, size[i]);
    assert_int_equal((uintptr_t)p[i] % 64, 0);
    memset(p[i], i & 255, size[i]);
  }
  assert_true(h.live > 1);
  for (int i = 0; i < N; i++)
    for (size_t k = 0; k < size[i]; k++) assert_int_equal(p[i][k], i & 255);
  assert_ptr_not_equal(arena_push(a, 0), arena_push(a, 0));
  arena_free(a);
  assert_int_equal(h.live, 0);
}

static void pop_gives_the_same_place_again(void **state) {
  (void)state;
  Heap h = {0, 0};
  Arena *a = arena_create(&h, heap_alloc, heap_free);
  ArenaMark bottom = arena_mark(a);
  char *first = arena_push(a, 100);
  memset(first, 7, 100);
  ArenaMark m = arena_mark(a);
  void *second = arena_push(a, 1000);
  arena_push(a, 3 << 20);
  arena_pop(a, m);
  assert_ptr_equal(arena_push(a, 10), second);
  assert_int_equal(first[99], 7);
  arena_pop(a, bottom);
  arena_free(a);
  assert_int_equal(h.live, 0);
}

static void empty_arena_merges_its_blocks(void **state) {
  (void)state;
  Heap h = {0, 0};
  Arena *a = arena_create(&h, heap_alloc, heap_free);
  ArenaMark bottom = arena_mark(a);
  for (int i = 0; i < 6; i++) arena_push(a, 1 << 20);
  assert_true(h.live > 1);
  arena_pop(a, bottom);
  assert_int_equal(h.live, 1);
  int taken = h.taken;
  for (int round = 0; round < 5; round++) { /* the same work again takes no memory */
    for (int i = 0; i < 6; i++) arena_push(a, 1 << 20);
    arena_pop(a, bottom);
  }
  assert_int_equal(h.taken, taken);
  arena_trim(a);
  assert_int_equal(h.live, 0);
  assert_non_null(arena_push(a, 5));
  arena_free(a);
}

static void peak_counts_bytes_in_use(void **state) {
  (void)state;
  Heap h = {0, 0};
  Arena *a = arena_create(&h, heap_alloc, heap_free);
  ArenaMark bottom = arena_mark(a);
  arena_push(a, 64);
  ArenaMark m = arena_mark(a);
  arena_push(a, 6400);
  arena_pop(a, m);
  arena_push(a, 640);
  assert_int_equal(arena_peak(a), 6464);
  arena_reset_peak(a);
  assert_int_equal(arena_peak(a), 704);
  arena_push(a, 1); /* rounded up to the alignment */
  assert_int_equal(arena_peak(a), 768);
  arena_pop(a, bottom);
  arena_free(a);
}

static void pop_above_top(void *arg) {
  Arena *a = arg;
  ArenaMark bottom = arena_mark(a);
  arena_push(a, 100);
  ArenaMark m = arena_mark(a);
  arena_pop(a, bottom);
  arena_pop(a, m);
}
static void trim_in_use(void *arg) {
  arena_push(arg, 1);
  arena_trim(arg);
}

static void misuse_dies(void **state) {
  (void)state;
  Heap h = {0, 0};
  Arena *a = arena_create(&h, heap_alloc, heap_free);
  assert_non_null(strstr(test_death(pop_above_top, a), "above the top"));
  assert_non_null(strstr(test_death(trim_in_use, a), "broken contract"));
  arena_free(a);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(pieces_are_apart_and_aligned),
    cmocka_unit_test(pop_gives_the_same_place_again),
    cmocka_unit_test(empty_arena_merges_its_blocks),
    cmocka_unit_test(peak_counts_bytes_in_use),
    cmocka_unit_test(misuse_dies),
};
TEST_MAIN(tests)
