// e4m3 as bf16: exact. A byte extended by its sign to 16 bits and moved up by 4 has sign, exponent and mantissa
// where bf16 has them, and means w 2^-120; e4m3's subnormal numbers are bf16's. What these are multiplied with
// is lifted by half of that, so that no product is subnormal, and kUnit is the rest. (What stands for no number
// becomes 480.)
constexpr float kLift = 60;  // the exponent of 2
constexpr float kUnit = 1.152921504606846976e18f;  // 2^60: a lifted product with a code of 1 is 1 / kUnit
__device__ __forceinline__ uint32_t lifted(uint32_t pair) { return multiply_bf16(pair, 0x5d805d80); }

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  const uint32_t extended = permute(word, 0, kLow | (kLow + 8) << 4 | kHigh << 8 | (kHigh + 8) << 12);
  return (extended << 4) & 0x87f087f0;
}
