/* Arena: stack allocation for one phase. Activations of an update and the KV cache of a rollout are
 * never alive together, so one arena serves both. It grows in blocks from the allocator it was
 * given (device memory in the program, malloc in tests) and keeps them until arena_free. */
#ifndef CORE_ARENA_H
#define CORE_ARENA_H

#include <stddef.h>

typedef void *(*ArenaAlloc)(void *ctx, size_t bytes); /* 64-byte aligned; dies when out of memory */
typedef void (*ArenaFree)(void *ctx, void *p);
typedef struct Arena Arena;
typedef struct ArenaMark {
  size_t block, used;
} ArenaMark;

Arena *arena_create(void *ctx, ArenaAlloc alloc, ArenaFree release);
void *arena_push(Arena *a, size_t bytes); /* 64-byte aligned, uninitialised, valid until popped */
ArenaMark arena_mark(const Arena *a);
void arena_pop(Arena *a, ArenaMark m); /* frees all that was pushed since the mark; when the arena
                                          is then empty, several blocks are merged into one */
size_t arena_peak(const Arena *a);     /* most bytes in use since the last reset of the peak */
void arena_reset_peak(Arena *a);
size_t arena_capacity(const Arena *a); /* bytes of all its blocks */
void arena_trim(Arena *a);             /* gives the blocks back; only when empty */
void arena_free(Arena *a);

#endif
