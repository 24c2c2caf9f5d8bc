// 1 / (1 + 2^-x) by the two fast units; exact limits at both infinities, NaN stays NaN.
__device__ __forceinline__ float logistic2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}
