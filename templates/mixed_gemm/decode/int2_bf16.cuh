// int2 by bf16: exact codes q / kUnit, and the scale is applied later. Below 256 the bits of a bf16 number
// are an integer n that means n 2^-133, subnormal or not, wherever in them the two bits of a code are: one
// LOP3 takes two of them, and one fused multiply-add moves them up and takes the 2 away, exactly. A word has
// the codes of two steps, the second's a byte higher.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 64;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], int second,
                                       uint32_t (&registers)[4]) const {
    const uint32_t word = second ? words[0] >> 8 : words[0];
    registers[0] = fma_bf16(word & 0x00030003, 0x7f007f00, 0xbd00bd00);  // 2^127, -2 / 64
    registers[1] = fma_bf16(word & 0x000c000c, 0x7e007e00, 0xbd00bd00);  // 2^125
    registers[2] = fma_bf16(word & 0x00300030, 0x7d007d00, 0xbd00bd00);  // 2^123
    registers[3] = fma_bf16(word & 0x00c000c0, 0x7c007c00, 0xbd00bd00);  // 2^121
  }
};
