// Multiplies by a scalar in device memory, read once.
struct ScaleDevice {
  float scale;

  __device__ __forceinline__ ScaleDevice(const float* address) : scale(*address) {}

  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= scale;
  }
};
