// mxfp4 by bf16: exact, with the power of two of its group. Sign, exponent and mantissa at bits 15, 8, 7 and
// 6 mean w 2^-126, subnormal or not, and one multiplication applies that and the scale, 2^(e - 127), e <=
// 128. Three registers lie in the word as they are, turned; the fourth has what is left.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)
      factor[row] = (scales >> 8 * row & 0xff) * 0x00800080 + 0x3f003f00;  // 2^(e - 1)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t word = words[0], left = word << 6;
    registers[0] = multiply_bf16(word & 0x81c081c0, factor[0]);
    registers[1] = multiply_bf16(__funnelshift_r(word, word, 6) & 0x81c081c0, factor[1]);
    registers[2] = multiply_bf16((word << 4) & 0x81c081c0, factor[0]);
    registers[3] = multiply_bf16((left & 0x80c080c0) | ((word >> 2) & 0x01000100), factor[1]);
  }
};
