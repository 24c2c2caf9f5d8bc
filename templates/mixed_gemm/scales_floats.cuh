  __device__ __forceinline__ float low() const { return scales.x; }
  __device__ __forceinline__ float high() const { return scales.y; }
