// int8 by bf16: (q s) / kUnit, rounded once: (n 2^-133) (s 2^117) - 128 s 2^-16, n = q + 128. Both constants
// are s with another exponent. |s| < 2^10.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 65536;
  uint32_t factor[2], offset[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t factors = multiply_bf16(scales, 0x7a007a00), offsets = multiply_bf16(scales, 0xbb00bb00);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row), offset[row] = both(offsets, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2], bytes = i % 2 ? permute(word, 0, 0x4341) : word & 0x00ff00ff;
      registers[i] = fma_bf16(bytes, factor[i % 2], offset[i % 2]);
    }
  }
};
