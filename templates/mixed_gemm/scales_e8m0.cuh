  // 2^(e - 127), of which the least is subnormal.
  __device__ __forceinline__ float low() const { return __uint_as_float(max((scales & 0xff) << 23, 0x400000u)); }
  __device__ __forceinline__ float high() const { return __uint_as_float(max(scales >> 8 << 23, 0x400000u)); }
