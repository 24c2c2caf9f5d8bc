// e4m3 as fp16: exact; the SM converts two at a time.
constexpr float kUnit = 1;  // that a code of 1 becomes is 1 / kUnit

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  if (kHigh == kLow + 1) return fp16_of_e4m3(word, kLow / 2);
  return fp16_of_e4m3(permute(word, 0, kLow | kHigh << 4), 0);
}
