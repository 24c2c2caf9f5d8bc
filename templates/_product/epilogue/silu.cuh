// x / (1 + exp(-x)).
struct Silu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) { return x * logistic2(1.44269504f * x); }
};
