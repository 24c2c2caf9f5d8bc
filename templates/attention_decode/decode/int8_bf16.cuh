// int8 as bf16: exact codes q / kUnit. Bits 0 to 7 of a bf16 number are an integer n that means n 2^-133, up to
// 255, so a byte of q + 128 under a byte of 0 needs only to be moved up, and its 128 taken away.
constexpr float kUnit = 64;

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  const uint32_t bytes = permute(word ^ 0x80808080, 0, kLow | 4 << 4 | kHigh << 8 | 4 << 12);
  return fma_bf16(bytes, 0x7f007f00, 0xc000c000);  // 2^127, -128 / 64
}
