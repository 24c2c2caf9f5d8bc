// Element i of two bf16, which are exact.
__device__ __forceinline__ float number(uint32_t pair, int i) {
  return __uint_as_float(i ? pair & 0xffff0000 : pair << 16);
}
