// x * Phi(x), Phi being the normal distribution function.
struct Gelu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    return 0.5f * x * (1.f + erff(x * 0.70710678f));
  }
};
