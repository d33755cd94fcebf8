/* process: one shell command, text in, lines out, within a time limit. */
#ifndef REWARD_PROCESS_H
#define REWARD_PROCESS_H

#include "core/error.h"

typedef struct ProcessLimits {
  double seconds;    /* for everything: start, input, output, exit */
  int lines;         /* of output; more is an error at once */
  size_t line_bytes; /* a longer line is an error at once */
} ProcessLimits;

/* Runs /bin/sh -c command in a process group of its own, writes input to its standard input and
 * collects its standard output (*output, NUL-terminated, the caller frees); standard error is ours.
 * Reading and writing go on side by side, so no amount of either blocks the other; a command that
 * does not read its input is fine. 0 when it exits with status 0 and nothing passed a limit;
 * else -1, and the whole group has been killed. */
int process_run(const char *command, const char *input, size_t input_len, ProcessLimits limits,
                char **output, size_t *output_len, Error *err);

#endif
