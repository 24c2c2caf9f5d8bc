// s + x s (1 - s) 2 u' with s = 1 / (1 + exp(-2u)) and u = sqrt(2 / pi) (x + 0.044715 x^3), the derivative
// of x s. The smaller of s and 1 - s is computed: no cancellation in either tail.
struct GeluTanhGradient {
  __device__ __forceinline__ static float slope(float x) {
    constexpr float kScale = 2.f * 0.79788456f, kLog2 = 1.44269504f;  // 2 sqrt(2 / pi), log2(e)
    const float square = x * x;
    const float small = logistic2(-kLog2 * fabsf(x) * fmaf(kScale * 0.044715f, square, kScale));
    const float large = 1.f - small, limit = x < 0.f ? small : large;
    const float rise = x * fmaf(kScale * 3.f * 0.044715f, square, kScale);  // x 2u'
    return small == 0.f ? limit : fmaf(rise * small, large, limit);  // rise may be infinite there
  }
};
