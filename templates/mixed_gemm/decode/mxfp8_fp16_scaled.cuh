// mxfp8 by fp16: (w s) / kUnit, exact for 104 <= e <= 126, as codes of e4m3 have four bits. A byte extended by its
// sign to 16 bits and moved up by 7 has exponent and mantissa where fp16 has them, and means w 2^-8; one
// multiplication applies that and the scale, 2^(e - 127).
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 0.00390625f;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)
      factor[row] = (max(scales >> 8 * row & 0xff, 96u) - 96) * 0x04000400;  // 2^(e - 111), or 0
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t extended = permute(words[i / 2], 0, i % 2 ? 0xb3a2 : 0x9180);
      registers[i] = multiply_fp16((extended << 7) & 0xbf80bf80, factor[i % 2]);
    }
  }
};
