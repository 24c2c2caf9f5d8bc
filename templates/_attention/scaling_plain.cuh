// The softmax is of scale q k^T.
struct Scaling {
  float exponent;  // the factor of a score in the argument of exp2

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : exponent(p.scale * kLog2E) {}
  __device__ __forceinline__ void cap(float (&)[kScores]) const {}
};
