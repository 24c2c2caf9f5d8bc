// nvfp4 by bf16: exact (w s) / kUnit, w e2m1 and s e4m3. Sign, exponent and mantissa of w at bits 15, 8, 7 and
// 6 mean w 2^-126, subnormal or not, and one multiplication applies that and the scale. Three registers lie in
// the word as they are, turned; the fourth has what is left. A scale extended by its sign and moved up by 4
// means s 2^-120.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 256;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t extended = (permute(scales, 0, 0x9180) << 4) & 0x87f087f0;
    const uint32_t factors = multiply_bf16(multiply_bf16(extended, 0x7b807b80), 0x7a807a80);  // s 2^118
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t word = words[0], left = word << 6;
    registers[0] = multiply_bf16(word & 0x81c081c0, factor[0]);
    registers[1] = multiply_bf16(__funnelshift_r(word, word, 6) & 0x81c081c0, factor[1]);
    registers[2] = multiply_bf16((word << 4) & 0x81c081c0, factor[0]);
    registers[3] = multiply_bf16((left & 0x80c080c0) | ((word >> 2) & 0x01000100), factor[1]);
  }
};
