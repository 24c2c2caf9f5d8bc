// x * Phi(x), Phi being the normal distribution function: by the rational approximation of erfc in
// Abramowitz and Stegun 7.1.26 (|error| < 1.5e-7), which keeps the negative tail and has no branch.
struct Gelu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * x * x));  // exp(-x^2 / 2)
    float tail = fmaf(t, 0.530702714f, -0.726576013f);  // half of erfc's coefficients
    tail = fmaf(t, fmaf(t, fmaf(t, tail, 0.710706870f), -0.142248368f), 0.127414796f) * t * power;
    return x * (x < 0.f ? tail : 1.f - tail);
  }
};
