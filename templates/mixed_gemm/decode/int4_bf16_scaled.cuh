// int4 by bf16: (q s) / kUnit, rounded once. As int4_bf16.cuh, with the scale in the one fused multiply-add:
// (n 2^-133) (s 2^117) - 8 s 2^-16, where both constants are s with another exponent, so nothing but the
// result is rounded. s < 2^10. Rows r have nibbles at bit 0, rows r + 8 at bit 4 (16 times as much).
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 65536;
  uint32_t factor[2], offset[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t factors = multiply_bf16(scales, 0x78007a00);  // 2^117, and 2^113 for r + 8
    const uint32_t offsets = multiply_bf16(scales, 0xb900b900);  // -2^-13
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row), offset[row] = both(offsets, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = fma_bf16(words[0] & 0x000f000f, factor[0], offset[0]);
    registers[1] = fma_bf16(words[0] & 0x00f000f0, factor[1], offset[1]);
    registers[2] = fma_bf16(up & 0x000f000f, factor[0], offset[0]);
    registers[3] = fma_bf16(up & 0x00f000f0, factor[1], offset[1]);
  }
};
