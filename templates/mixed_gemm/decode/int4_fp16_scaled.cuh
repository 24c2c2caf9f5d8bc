// int4 by fp16: q s, rounded once. A nibble at bit 0 under the exponent of 1024 is 1024 + q, and one at bit
// 4 under that of 64 is 64 + q: one LOP3 takes two, one addition takes the rest away.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;
  uint32_t offset[2], factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(scales, row);
    offset[0] = 0xe408e408, offset[1] = 0xd480d480;  // -(1024 + 8), -(64 + 8)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = multiply_fp16(add_fp16(masked_with(words[0], 0x000f000f, 0x64006400), offset[0]), factor[0]);
    registers[1] = multiply_fp16(add_fp16(masked_with(words[0], 0x00f000f0, 0x54005400), offset[1]), factor[1]);
    registers[2] = multiply_fp16(add_fp16(masked_with(up, 0x000f000f, 0x64006400), offset[0]), factor[0]);
    registers[3] = multiply_fp16(add_fp16(masked_with(up, 0x00f000f0, 0x54005400), offset[1]), factor[1]);
  }
};
