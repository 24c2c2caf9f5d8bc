  __device__ __forceinline__ float low() const { return __uint_as_float(scales << 16); }
  __device__ __forceinline__ float high() const { return __uint_as_float(scales & 0xffff0000); }
