// g / (1 + exp(-1.702 g)) with g = min(x, 7), as gpt-oss has it. NaN stays NaN.
struct SwigluOai {
  __device__ __forceinline__ static float function(float x) {
    const float gate = x > 7.f ? 7.f : x;
    return gate * logistic2(1.702f * 1.44269504f * gate);
  }
};
