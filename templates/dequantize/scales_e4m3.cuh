  __device__ __forceinline__ float low() const { return of_e4m3(scales & 0xff); }
  __device__ __forceinline__ float high() const { return of_e4m3(scales >> 8); }
  // Exponent and mantissa where fp32 has them mean s 2^-120, subnormal or not.
  __device__ __forceinline__ static float of_e4m3(uint32_t byte) {
    return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
  }
