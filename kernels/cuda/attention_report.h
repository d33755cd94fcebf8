/* What serves attention on a CUDA device, for tests and benches. No CUDA header is needed. */
#ifndef KERNELS_CUDA_ATTENTION_REPORT_H
#define KERNELS_CUDA_ATTENTION_REPORT_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A line for each shape that has been asked for so far: engine, workspace and build time, or why
 * cuDNN refused it. The caller frees it. A build without CUDA has no such function: its address is
 * NULL. */
char *cuda_attention_report(Device *d) __attribute__((weak));

#ifdef __cplusplus
}
#endif

#endif
