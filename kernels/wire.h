/* Arithmetic of wire formats that back ends share. Internal to kernels/. */
#ifndef KERNELS_WIRE_H
#define KERNELS_WIRE_H

#include "kernels/kernels.h"

static inline bool wire_has_blocks(WireFormat f) {
  return f.kind != WIRE_F32 && f.kind != WIRE_BF16;
}
int64_t wire_row_blocks(WireFormat f, int64_t width); /* blocks of a row */
void wire_check(WireFormat f, WireSpan s);            /* dies unless they fit each other */

#endif
