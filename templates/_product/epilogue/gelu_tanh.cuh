// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2u)): no
// cancellation in the negative tail.
struct GeluTanh {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    constexpr float kScale = 2.f * 0.79788456f * 1.44269504f;  // 2 sqrt(2 / pi) log2(e)
    return x * logistic2(x * fmaf(kScale * 0.044715f, x * x, kScale));
  }
};
