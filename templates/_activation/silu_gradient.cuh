// s (1 + x (1 - s)) with s = 1 / (1 + exp(-x)), the derivative of x s. The smaller of s and 1 - s is
// computed, the other is its difference from 1: no cancellation in either tail.
struct SiluGradient {
  __device__ __forceinline__ static float slope(float x) {
    const float small = logistic2(-1.44269504f * fabsf(x)), large = 1.f - small;
    const float limit = x < 0.f ? small : large;
    return small == 0.f ? limit : fmaf(x * small, large, limit);  // x may be infinite there
  }
};
