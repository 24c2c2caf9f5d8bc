// int2 by fp16: q s, rounded once. Two bits at bit 0 under the exponent of 1024 are 1024 + q, at bit 2 under
// that of 256 they are 256 + q, and so on: one LOP3 takes two codes, one addition takes the rest away. A word
// has the codes of two steps, the second's a byte higher.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;
  uint32_t offset[4], factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(scales, row);
    offset[0] = 0xe402e402, offset[1] = 0xdc08dc08;  // -(1024 + 2), -(256 + 2)
    offset[2] = 0xd420d420, offset[3] = 0xcc80cc80;  // -(64 + 2), -(16 + 2)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], int second,
                                       uint32_t (&registers)[4]) const {
    const uint32_t word = second ? words[0] >> 8 : words[0];
    registers[0] = multiply_fp16(add_fp16(masked_with(word, 0x00030003, 0x64006400), offset[0]), factor[0]);
    registers[1] = multiply_fp16(add_fp16(masked_with(word, 0x000c000c, 0x5c005c00), offset[1]), factor[1]);
    registers[2] = multiply_fp16(add_fp16(masked_with(word, 0x00300030, 0x54005400), offset[2]), factor[0]);
    registers[3] = multiply_fp16(add_fp16(masked_with(word, 0x00c000c0, 0x4c004c00), offset[3]), factor[1]);
  }
};
