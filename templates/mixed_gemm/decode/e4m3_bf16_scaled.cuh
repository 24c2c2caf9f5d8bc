// e4m3 by bf16: (w s) / kUnit, rounded once. A byte extended by its sign to 16 bits and moved up by 4 has
// sign, exponent and mantissa where bf16 has them, and means w 2^-120; e4m3's subnormal numbers are bf16's.
// One multiplication applies that and the scale. |s| < 2^23.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 65536;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t factors = multiply_bf16(scales, 0x73807380);  // 2^104
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t extended = permute(words[i / 2], 0, i % 2 ? 0xb3a2 : 0x9180);
      registers[i] = multiply_bf16((extended << 4) & 0x87f087f0, factor[i % 2]);
    }
  }
};
