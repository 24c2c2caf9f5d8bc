// Element i of four e4m3. Exponent and mantissa where fp32 has them mean w 2^-120, subnormal or not.
__device__ __forceinline__ float number(uint32_t bytes, int i) {
  const uint32_t byte = bytes >> 8 * i;
  return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}
