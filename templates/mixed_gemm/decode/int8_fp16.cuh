// int8 by fp16: exact codes q / kUnit. Bits 0 to 10 of an fp16 number are an integer n that means n 2^-24, so a byte of
// q + 128 needs only to be moved up, and its 128 taken away.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 512;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2], bytes = i % 2 ? permute(word, 0, 0x4341) : word & 0x00ff00ff;
      const uint32_t code = fma_fp16(bytes, 0x78007800, 0xb400b400);  // 2^15, -128 / 512
      registers[i] = code;
    }
  }
};
