/* Activations of the MLPs without a gate: ReLU and the two GELUs (Hendrycks & Gimpel 2016). */
#include "kernels/cuda/math.h"
#include "kernels/cuda/rows.h"

/* y = f(x), and dx from dy and x. Not x > 0 ? x : 0, which would turn NaN into 0. */
struct Relu {
  __device__ float operator()(float x, float) const { return x < 0 ? 0 : x; }
};
struct ReluSlope {
  __device__ float operator()(float dy, float x) const { return dy * (x > 0 ? 1.0f : 0.0f); }
};

/* x Phi(x), Phi the normal distribution. */
__device__ inline float phi(float x) { return 0.5f * (1.0f + erff(x * 0.707106781187f)); }
struct Gelu {
  __device__ float operator()(float x, float) const { return x * phi(x); }
};
struct GeluSlope {
  __device__ float operator()(float dy, float x) const {
    const float density = 0.398942280401f; /* 1 / sqrt(2 pi) */
    return dy * (phi(x) + x * density * exp_f32(-0.5f * x * x));
  }
};

/* x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh u) / 2 = sigmoid(2 u). */
constexpr float cubic = 0.044715f, twice_root = 1.595769121606f; /* 2 sqrt(2 / pi) */
struct GeluTanh {
  __device__ float operator()(float x, float) const {
    return x * sigmoid_f32(twice_root * (x + cubic * x * x * x));
  }
};
struct GeluTanhSlope {
  __device__ float operator()(float dy, float x) const {
    float s = sigmoid_f32(twice_root * (x + cubic * x * x * x));
    return dy * (s + x * s * (1.0f - s) * twice_root * (1.0f + 3.0f * cubic * x * x));
  }
};

void cuda_act_fwd(Device *d, Activation kind, Tensor x_NF, Tensor y_NF) {
  require(x_NF.ndim == 2 && is_2d(y_NF, x_NF.dtype, x_NF.dim[0], x_NF.dim[1]));
  switch (kind) {
    case ACT_RELU:
      return cuda_map<false>(d, x_NF, x_NF, y_NF, Relu());
    case ACT_GELU:
      return cuda_map<false>(d, x_NF, x_NF, y_NF, Gelu());
    case ACT_GELU_TANH:
      return cuda_map<false>(d, x_NF, x_NF, y_NF, GeluTanh());
  }
  die("no activation %d", static_cast<int>(kind));
}

void cuda_act_bwd(Device *d, Activation kind, Tensor dy_NF, Tensor x_NF, Tensor dx_NF) {
  int64_t n = x_NF.dim[0], f = x_NF.dim[1];
  require(x_NF.ndim == 2 && is_2d(dy_NF, x_NF.dtype, n, f) && is_2d(dx_NF, x_NF.dtype, n, f));
  switch (kind) {
    case ACT_RELU:
      return cuda_map<true>(d, dy_NF, x_NF, dx_NF, ReluSlope());
    case ACT_GELU:
      return cuda_map<true>(d, dy_NF, x_NF, dx_NF, GeluSlope());
    case ACT_GELU_TANH:
      return cuda_map<true>(d, dy_NF, x_NF, dx_NF, GeluTanhSlope());
  }
  die("no activation %d", static_cast<int>(kind));
}
