// int8 by fp16: q s, rounded once. Bits 0 to 10 of an fp16 number are an integer n that means n 2^-24, so a byte of
// q + 128 needs only to be moved up, and its 128 taken away; s 512 brings it to its place. |s| < 127.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t factors = multiply_fp16(scales, 0x60006000);  // 512
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2], bytes = i % 2 ? permute(word, 0, 0x4341) : word & 0x00ff00ff;
      const uint32_t code = fma_fp16(bytes, 0x78007800, 0xb400b400);  // 2^15, -128 / 512
      registers[i] = multiply_fp16(code, factor[i % 2]);
    }
  }
};
