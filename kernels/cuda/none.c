/* Takes the place of the CUDA back end in builds without it (no nvcc, or CUDA=0). */
#include "kernels/backend.h"

Device *cuda_device_open(int threads, Error *err) {
  (void)threads;
  error_set(err,
            "device cuda: this build has no CUDA back end (built without nvcc, or with CUDA=0); "
            "use device cpu");
  return NULL;
}
