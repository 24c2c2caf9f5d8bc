// Element i of four int8. Under the exponent of 2^23 a byte q + 128 means 2^23 + 128 + q.
__device__ __forceinline__ float number(uint32_t bytes, int i) {
  return __uint_as_float(0x4b000000 | ((bytes ^ 0x80808080) >> 8 * i & 0xff)) - 8388736.f;
}
