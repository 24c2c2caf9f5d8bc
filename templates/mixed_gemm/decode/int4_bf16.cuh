// int4 by bf16: exact codes q / kUnit, and the scale is applied later. Below 256 the bits of a bf16
// number are an integer n that means n 2^-133, subnormal or not, so that a nibble needs no exponent set: one
// LOP3 takes two of them, and one fused multiply-add moves them up and takes the 8 away, exactly.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 64;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = fma_bf16(words[0] & 0x000f000f, 0x7f007f00, 0xbe00be00);  // 2^127, -8 / 64
    registers[1] = fma_bf16(words[0] & 0x00f000f0, 0x7d007d00, 0xbe00be00);  // 2^123
    registers[2] = fma_bf16(up & 0x000f000f, 0x7f007f00, 0xbe00be00);
    registers[3] = fma_bf16(up & 0x00f000f0, 0x7d007d00, 0xbe00be00);
  }
};
