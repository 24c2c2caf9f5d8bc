// e4m3 as bf16: exact. A byte extended by its sign to 16 bits and moved up by 4 has sign, exponent and mantissa
// where bf16 has them, and means w 2^-120; e4m3's subnormal numbers are bf16's. One multiplication undoes it.
// (What stands for no number becomes 480.)
constexpr float kUnit = 1;  // that a code of 1 becomes is 1 / kUnit

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  const uint32_t extended = permute(word, 0, kLow | (kLow + 8) << 4 | kHigh << 8 | (kHigh + 8) << 12);
  return multiply_bf16((extended << 4) & 0x87f087f0, 0x7b807b80);
}
