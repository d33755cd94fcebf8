/* What a block's changes are, on their way from the values to the stream. Internal to kernels/cpu.
 */
#ifndef KERNELS_CPU_DELTA_H
#define KERNELS_CPU_DELTA_H

#include "kernels/delta.h"

enum { DELTA_SLACK = 32 }; /* elements behind a list that whole vectors may write */

typedef struct DeltaScan {
  int changes, escapes;
  uint32_t bitmap[DELTA_BLOCK / 32];
  uint16_t entry[DELTA_BLOCK + DELTA_SLACK]; /* place times 16 plus code */
  uint16_t value[DELTA_BLOCK + DELTA_SLACK];
} DeltaScan;

#endif
