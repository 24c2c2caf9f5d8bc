// Multiplies by a scalar that the host passed.
struct ScaleHost {
  float scale;

  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= scale;
  }
};
