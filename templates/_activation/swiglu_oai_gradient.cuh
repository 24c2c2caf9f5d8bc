// Of g / (1 + exp(-1.702 g)) with g = min(x, 7): s (1 + 1.702 g (1 - s)), as silu's, and 0 past
// 7. Of min(max(x, -7), 7) + 1: 1 within. NaN stays NaN.
struct SwigluOaiGradient {
  __device__ __forceinline__ static float slope(float x) {
    const float scaled = 1.702f * x;
    const float small = logistic2(-1.44269504f * fabsf(scaled)), large = 1.f - small;
    const float limit = x < 0.f ? small : large;
    const float slope = small == 0.f ? limit : fmaf(scaled * small, large, limit);  // x may be infinite there
    return x > 7.f ? 0.f : slope;
  }
};
struct SwigluOaiFactor {
  __device__ __forceinline__ static float function(float x) {
    return (x > 7.f ? 7.f : x < -7.f ? -7.f : x) + 1.f;
  }
  __device__ __forceinline__ static float slope(float x) { return x > 7.f || x < -7.f ? 0.f : 1.f; }
};
