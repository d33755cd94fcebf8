/* Sequences and heads of an attention test; what the CPU's and the GPU's tests share. */
#ifndef ATTENTION_CASES_H
#define ATTENTION_CASES_H

#include "kernels/kernels.h"

typedef struct Case {
  int n_seqs;
  int32_t len[24];
  AttnShape s;
} Case;

#define MANY_SHORT \
  { 1, 2, 1, 3, 1, 0, 5, 1, 1, 2, 8, 1, 1, 0, 4, 1, 7, 1, 1, 2, 16, 1, 3, 1 }

#endif
