/* The readable twin of the quantization ops, for tests, and the scale that both use. Internal to
 * kernels/cpu and its tests. */
#ifndef KERNELS_CPU_QUANT_H
#define KERNELS_CPU_QUANT_H

#include "kernels/wire.h"

/* The scale of a block whose largest |x| has these bits (magnitudes of floats sort as their bits,
 * infinity and NaN last). */
float quant_scale(WireFormat f, uint32_t magnitude);

/* One element at a time, one span, formats with blocks: what the ops compute, as their contracts
 * say it. */
void quant_reference_encode(WireFormat f, WireSpan s, const float *x, WireData to);
void quant_reference_decode(WireFormat f, WireSpan s, WireData from, float *y);
/* The sum of from.n spans, 17 at most, INT4 both. */
void quant_reference_requantize(WireFormat f, WireFormat f_to, WireSpan s, WireData from,
                                WireData to);

#endif
