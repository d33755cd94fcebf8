/* Errors: two kinds, no third.
 *
 * The outside world (recipe, files, prompts, checkpoints): a function returns -1 (or NULL) and
 * fills an Error with one message that names file, place, what was found and what was expected.
 * main prints it and exits 1 (2 for usage).
 *
 * A broken contract, device or communicator: die() prints rank, file:line and cause, and ends all
 * ranks. No silent fallback: what is switched on either happens or is refused.
 */
#ifndef CORE_ERROR_H
#define CORE_ERROR_H

#include <stdbool.h>
#include <stddef.h>

typedef struct Error {
  char msg[4096]; /* "" when no error; longer messages are cut, never overflow */
} Error;

/* Sets the message; returns -1 so that `return error_set(err, ...)` reads well. err may be NULL. */
int error_set(Error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts "prefix: " before the message that is there; returns -1. */
int error_prefix(Error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Ends all ranks: prints "rlhf: rank R: file:line: message" to stderr, calls the abort hook if one
 * is set (kernels/launch.c sets one that ends the MPI job), then abort(). */
#ifdef __cplusplus
#define NORETURN [[noreturn]]
#else
#define NORETURN _Noreturn
#endif
NORETURN void die_at(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
#define die(...) die_at(__FILE__, __LINE__, __VA_ARGS__)

/* A contract of our own code: dies with the condition's text. Never for bad input. */
#define require(cond)                               \
  do {                                              \
    if (!(cond)) die("broken contract: %s", #cond); \
  } while (0)

/* Who this process is and how to end the others. Called once, by the launcher. */
void die_set_rank(int rank, void (*abort_all)(int code));

/* malloc family that dies when memory is out; sizes are checked for overflow. free() releases. */
void *mem_alloc(size_t count, size_t size);  /* uninitialised */
void *mem_zalloc(size_t count, size_t size); /* zeroed */
void *mem_grow(void *p, size_t count, size_t size);
char *mem_strdup(const char *s);
char *mem_printf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* One line to stderr from rank 0 only: "rlhf: ...", "rlhf: warning: ...". */
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
