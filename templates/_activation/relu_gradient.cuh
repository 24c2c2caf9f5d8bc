// Of max(x, 0): 0 at 0, NaN stays NaN.
struct ReluGradient {
  __device__ __forceinline__ static float slope(float x) { return x > 0.f ? 1.f : x <= 0.f ? 0.f : x; }
};
