// int8 as fp16: exact. A byte of q + 128 under a byte of 0x64 is 1024 + 128 + q.
constexpr float kUnit = 1;  // that a code of 1 becomes is 1 / kUnit

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  return add_fp16(permute(word ^ 0x80808080, 0x64646464, kLow | 4 << 4 | kHigh << 8 | 4 << 12), 0xe480e480);  // -1152
}
