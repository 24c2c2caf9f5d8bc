// mxfp8 by bf16: exact, with the power of two of its group, down to bf16's least number. A byte extended by its
// sign to 16 bits and moved up by 4 has sign, exponent and mantissa where bf16 has them, and means w 2^-120;
// one multiplication applies that and the scale, 2^(e - 127).
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)
      factor[row] = (scales >> 8 * row & 0xff) * 0x00800080 + 0x3c003c00;  // 2^(e - 7)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t extended = permute(words[i / 2], 0, i % 2 ? 0xb3a2 : 0x9180);
      registers[i] = multiply_bf16((extended << 4) & 0x87f087f0, factor[i % 2]);
    }
  }
};
