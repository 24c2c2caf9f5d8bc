// int2 by fp16: exact codes q / kUnit. Bits 0 to 10 of an fp16 number are an integer n that means n 2^-24,
// wherever in them the two bits of a code are: one LOP3 takes two codes, and one fused multiply-add moves them
// up and takes the 2 away, exactly. A word has the codes of two steps, the second's a byte higher.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 512;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], int second,
                                       uint32_t (&registers)[4]) const {
    const uint32_t word = second ? words[0] >> 8 : words[0];
    registers[0] = fma_fp16(word & 0x00030003, 0x78007800, 0x9c009c00);  // 2^15, -2 / 512
    registers[1] = fma_fp16(word & 0x000c000c, 0x70007000, 0x9c009c00);  // 2^13
    registers[2] = fma_fp16(word & 0x00300030, 0x68006800, 0x9c009c00);  // 2^11
    registers[3] = fma_fp16(word & 0x00c000c0, 0x60006000, 0x9c009c00);  // 2^9
  }
};
