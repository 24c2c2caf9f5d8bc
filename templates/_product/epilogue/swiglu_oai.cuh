// g / (1 + exp(-1.702 g)) with g = min(x, 7), and min(max(x, -7), 7) + 1, as gpt-oss has them. NaN stays NaN.
struct SwigluOai {
  __device__ __forceinline__ static float function(float x) {
    const float gate = x > 7.f ? 7.f : x;
    return gate * logistic2(1.702f * 1.44269504f * gate);
  }
};
struct SwigluOaiUp {
  __device__ __forceinline__ static float function(float x) {
    return (x > 7.f ? 7.f : x < -7.f ? -7.f : x) + 1.f;
  }
};
