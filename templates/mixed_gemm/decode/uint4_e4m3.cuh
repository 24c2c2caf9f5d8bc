// uint4 by e4m3: exact (q - z) / kUnit; the scale is applied later. Bits 0 to 3 of e4m3 are an integer n
// that means n 2^-9, as 16 does too. With 128 more no byte borrows from the next, and its sign is that of q - z,
// turned round: PRMT makes a mask of it, by which what is negative becomes its size and a sign.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 512;
  uint32_t zero[2];  // of a row, in each byte

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) zero[row] = permute(zeros, 0, row ? 0x1111 : 0);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      const uint32_t more = masked_with(nibbles, 0x0f0f0f0f, 0x80808080) - zero[i % 2];
      const uint32_t negative = ~permute(more, 0, 0xba98);
      registers[i] = ((more ^ negative) & 0x7f7f7f7f) + (negative & 0x81818181);
    }
  }
};
