// int2 by bf16: (q s) / kUnit, rounded once. As int2_bf16.cuh, with the scale in the one fused multiply-add:
// (n 2^-133) (s 2^117) - 2 s 2^-16, where both constants are s with another exponent, so nothing but the result
// is rounded. s < 2^10. Rows r have codes at bits 0 and 4, rows r + 8 at bits 2 and 6.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 65536;
  uint32_t factor[4], offset[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t low = multiply_bf16(scales, 0x79007a00);     // 2^117, and 2^115 for r + 8
    const uint32_t high = multiply_bf16(scales, 0x77007800);    // 2^113, and 2^111
    const uint32_t offsets = multiply_bf16(scales, 0xb800b800);  // -2^-15
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      factor[row] = both(low, row), factor[row + 2] = both(high, row);
      offset[row] = both(offsets, row);
    }
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], int second,
                                       uint32_t (&registers)[4]) const {
    const uint32_t word = second ? words[0] >> 8 : words[0];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) registers[i] = fma_bf16(word & (0x00030003 << 2 * i), factor[i], offset[i % 2]);
  }
};
