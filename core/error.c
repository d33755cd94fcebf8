/* Errors, checked allocation and log lines. The only state is who this process is: its rank and how
 * it ends the others, set once by the launcher. */
#include "core/error.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
  int rank;
  void (*abort_all)(int code);
} process;

/* Names come out of files that others made: what they hold must not steer a terminal. Lines stay.
 */
static void make_printable(char *msg) {
  for (; *msg; msg++)
    if (((unsigned char)*msg < 0x20 && *msg != '\n' && *msg != '\t') || *msg == 0x7F) *msg = '?';
}

int error_set(Error *err, const char *fmt, ...) {
  if (!err) return -1;
  va_list ap;
  va_start(ap, fmt);
  /* Through a second buffer: an argument may be the old message. */
  char msg[sizeof err->msg];
  vsnprintf(msg, sizeof msg, fmt, ap);
  va_end(ap);
  make_printable(msg);
  memcpy(err->msg, msg, sizeof msg);
  return -1;
}

int error_prefix(Error *err, const char *fmt, ...) {
  if (!err) return -1;
  char old[sizeof err->msg];
  memcpy(old, err->msg, sizeof old);
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(err->msg, sizeof err->msg, fmt, ap);
  va_end(ap);
  make_printable(err->msg);
  size_t used = strlen(err->msg), room = sizeof err->msg - 1 - used;
  strncat(err->msg, ": ", room);
  if (room > 2) strncat(err->msg, old, room - 2);
  return -1;
}

_Noreturn void die_at(const char *file, int line, const char *fmt, ...) {
  fflush(stdout);
  fprintf(stderr, "rlhf: rank %d: %s:%d: ", process.rank, file, line);
  va_list ap;
  va_start(ap, fmt);
  vfprintf(stderr, fmt, ap);
  va_end(ap);
  fputc('\n', stderr);
  fflush(stderr);
  if (process.abort_all) process.abort_all(1);
  abort();
}

void die_set_rank(int rank, void (*abort_all)(int code)) {
  process.rank = rank;
  process.abort_all = abort_all;
}

static size_t checked_bytes(size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes) || bytes > PTRDIFF_MAX)
    die("allocation of %zu elements of %zu bytes overflows", count, size);
  return bytes ? bytes : 1;
}

void *mem_alloc(size_t count, size_t size) { return mem_grow(NULL, count, size); }

void *mem_zalloc(size_t count, size_t size) {
  size_t bytes = checked_bytes(count, size);
  void *p = calloc(1, bytes);
  if (!p) die("out of memory: %zu bytes", bytes);
  return p;
}

void *mem_grow(void *p, size_t count, size_t size) {
  size_t bytes = checked_bytes(count, size);
  void *q = realloc(p, bytes);
  if (!q) die("out of memory: %zu bytes", bytes);
  return q;
}

char *mem_strdup(const char *s) {
  size_t n = strlen(s) + 1;
  return memcpy(mem_alloc(n, 1), s, n);
}

char *mem_printf(const char *fmt, ...) {
  char *s = NULL;
  va_list ap;
  va_start(ap, fmt);
  int n = vasprintf(&s, fmt, ap);
  va_end(ap);
  if (n < 0) die("out of memory or bad format: \"%s\"", fmt);
  return s;
}

static void log_line(const char *word, const char *fmt, va_list ap) {
  if (process.rank != 0) return;
  fprintf(stderr, "rlhf: %s", word);
  vfprintf(stderr, fmt, ap);
  fputc('\n', stderr);
}

void log_info(const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  log_line("", fmt, ap);
  va_end(ap);
}

void log_warn(const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  log_line("warning: ", fmt, ap);
  va_end(ap);
}
