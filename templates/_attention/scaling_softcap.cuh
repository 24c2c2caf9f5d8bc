// The softmax is of softcap tanh(scale q k^T / softcap): what becomes of a score here is the tanh.
struct Scaling {
  float exponent;  // the factor of a score in the argument of exp2
  float argument;  // of a product in the argument of tanh

  __device__ __forceinline__ explicit Scaling(const Parameters& p)
      : exponent(p.softcap * kLog2E), argument(__fdividef(p.scale, p.softcap)) {}
  __device__ __forceinline__ void cap(float (&scores)[kScores]) const {
    CUTE_UNROLL
    for (int i = 0; i < kScores; ++i) asm("tanh.approx.f32 %0, %1;" : "=f"(scores[i]) : "f"(scores[i] * argument));
  }
};
