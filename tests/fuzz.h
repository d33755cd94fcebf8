/* What a fuzz target (tests/fuzz_<reader>.c) has: LLVMFuzzerTestOneInput for libFuzzer, and seeds
 * for the driver in tests/fuzz.c, which stands in where there is no libFuzzer. A target returns 0
 * and dies when a promise of the reader is broken. A comment line of the target, `corpus: PATH
 * PATH`, names folders below the shared data that hold further seeds. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/error.h"

typedef struct FuzzSeed {
  const char *data;
  size_t len;
} FuzzSeed;
#define FUZZ_SEED(text) \
  { text, sizeof(text) - 1 }

extern const FuzzSeed fuzz_seeds[];
extern const int fuzz_n_seeds;
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

/* A file in memory for readers that want a path; close the descriptor it returns. */
static inline int fuzz_file(const uint8_t *data, size_t len, char path[64]) {
  int fd = memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || write(fd, data, len) != (ssize_t)len) die("cannot make a file in memory");
  snprintf(path, 64, "/proc/self/fd/%d", fd);
  return fd;
}

#endif
