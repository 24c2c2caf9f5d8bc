// int4 by e4m3: exact codes q / kUnit; the scale is applied later. Bits 0 to 3 of e4m3 are an integer n
// that means n 2^-9, as 16 does too. A nibble is 2 q, or 2 (-1 - q) + 1 where q is negative: that 1 becomes
// the sign and, in the same multiply-add, the 2 that is missing.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 256;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      registers[i] = (nibbles & 0x01010101) * 0x82 + (nibbles & 0x0e0e0e0e);
    }
  }
};
