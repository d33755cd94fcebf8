/* AdamW (Loshchilov & Hutter 2019), step for step as torch.optim.AdamW computes it. */
#include <math.h>

#include "kernels/cpu/cpu.h"

void cpu_adamw(Device *d, AdamW p, Tensor w, Tensor g, Tensor m, Tensor v, Tensor out) {
  int64_t n = tensor_numel(w);
  require(w.dtype == DT_F32 && g.dtype == DT_F32 && m.dtype == DT_F32 && v.dtype == DT_F32);
  require(!out.data); /* the CPU computes in F32: a weight is its master */
  require(tensor_numel(g) == n && tensor_numel(m) == n && tensor_numel(v) == n && p.t >= 1);
  double correct1 = 1.0 - pow((double)p.beta1, (double)p.t);
  double correct2 = 1.0 - pow((double)p.beta2, (double)p.t);
  float step = (float)((double)p.lr / correct1);
  float root2 = (float)sqrt(correct2);
  float keep = (float)(1.0 - (double)p.lr * (double)p.weight_decay);
  float *wv = tensor_f32(w), *mv = tensor_f32(m), *vv = tensor_f32(v);
  const float *gv = tensor_f32(g);
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    float gi = gv[i] * p.grad_scale;
    mv[i] += (1.0f - p.beta1) * (gi - mv[i]);
    vv[i] = p.beta2 * vv[i] + (1.0f - p.beta2) * gi * gi;
    wv[i] = keep * wv[i] - step * mv[i] / (sqrtf(vv[i]) / root2 + p.eps);
  }
}
