/* Arena: a stack over a list of blocks. `current` is the block that pushes come from; blocks behind
 * it are empty, blocks before it are full or were left because the request did not fit. */
#include "core/arena.h"

#include <stdint.h>
#include <stdlib.h>

#include "core/error.h"

enum { ALIGN = 64, MAX_BLOCKS = 64 };
static const size_t first_block = (size_t)1 << 20;

typedef struct Block {
  char *data;
  size_t size, used;
} Block;

struct Arena {
  void *ctx;
  ArenaAlloc alloc;
  ArenaFree release;
  Block block[MAX_BLOCKS];
  size_t n_blocks, current;
  size_t in_use, peak;
};

Arena *arena_create(void *ctx, ArenaAlloc alloc, ArenaFree release) {
  Arena *a = mem_zalloc(1, sizeof *a);
  a->ctx = ctx;
  a->alloc = alloc;
  a->release = release;
  return a;
}

static void add_block(Arena *a, size_t size) {
  if (a->n_blocks == MAX_BLOCKS) die("arena: more than %d blocks", MAX_BLOCKS);
  a->block[a->n_blocks++] = (Block){a->alloc(a->ctx, size), size, 0};
}

size_t arena_capacity(const Arena *a) {
  size_t sum = 0;
  for (size_t i = 0; i < a->n_blocks; i++) sum += a->block[i].size;
  return sum;
}

void *arena_push(Arena *a, size_t bytes) {
  if (bytes > PTRDIFF_MAX - ALIGN) die("arena: request of %zu bytes", bytes);
  size_t need = (bytes + ALIGN - 1) / ALIGN * ALIGN;
  if (need == 0) need = ALIGN; /* distinct pointers, so that an empty array is not "absent" */
  while (a->current < a->n_blocks && a->block[a->current].size - a->block[a->current].used < need)
    a->current++;
  if (a->current == a->n_blocks) {
    /* At least as much again as there is, so that the number of blocks stays logarithmic. */
    size_t size = arena_capacity(a) > first_block ? arena_capacity(a) : first_block;
    add_block(a, need > size ? need : size);
  }
  Block *b = &a->block[a->current];
  void *p = b->data + b->used;
  b->used += need;
  a->in_use += need;
  if (a->in_use > a->peak) a->peak = a->in_use;
  return p;
}

ArenaMark arena_mark(const Arena *a) {
  if (a->current == a->n_blocks) return (ArenaMark){a->current, 0};
  return (ArenaMark){a->current, a->block[a->current].used};
}

static void release_blocks(Arena *a) {
  for (size_t i = 0; i < a->n_blocks; i++) a->release(a->ctx, a->block[i].data);
  a->n_blocks = a->current = 0;
}

void arena_pop(Arena *a, ArenaMark m) {
  require(m.block <= a->current);
  for (size_t i = m.block; i < a->n_blocks; i++) {
    Block *b = &a->block[i];
    size_t keep = i == m.block ? m.used : 0;
    if (b->used < keep) die("arena: popped to a mark above the top");
    a->in_use -= b->used - keep;
    b->used = keep;
  }
  a->current = m.block;
  if (a->in_use == 0 && a->n_blocks > 1) {
    size_t size = arena_capacity(a);
    release_blocks(a);
    add_block(a, size);
  }
}

size_t arena_peak(const Arena *a) { return a->peak; }

void arena_reset_peak(Arena *a) { a->peak = a->in_use; }

void arena_trim(Arena *a) {
  require(a->in_use == 0);
  release_blocks(a);
}

void arena_free(Arena *a) {
  if (!a) return;
  release_blocks(a);
  free(a);
}
