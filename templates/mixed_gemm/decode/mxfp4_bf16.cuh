// mxfp4 by bf16: exact e2m1. Sign, exponent and mantissa at bits 15, 8, 7 and 6 mean w 2^-126, subnormal or
// not, and one multiplication undoes it. Three registers lie in the word as they are, turned; the fourth has
// what is left.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t word = words[0], left = word << 6;
    registers[0] = multiply_bf16(word & 0x81c081c0, 0x7e807e80);
    registers[1] = multiply_bf16(__funnelshift_r(word, word, 6) & 0x81c081c0, 0x7e807e80);
    registers[2] = multiply_bf16((word << 4) & 0x81c081c0, 0x7e807e80);
    registers[3] = multiply_bf16((left & 0x80c080c0) | ((word >> 2) & 0x01000100), 0x7e807e80);
  }
};
