// int8 by bf16: exact codes q / kUnit. Bits 0 to 7 of a bf16 number are an integer n that means n 2^-133, up
// to 255, so a byte of q + 128 under a byte of 0 needs only to be moved up, and its 128 taken away.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 64;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2], bytes = i % 2 ? permute(word, 0, 0x4341) : word & 0x00ff00ff;
      registers[i] = fma_bf16(bytes, 0x7f007f00, 0xc000c000);  // 2^127, -128 / 64
    }
  }
};
