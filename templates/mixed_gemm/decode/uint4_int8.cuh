// uint4 by int8: exact q - z; the scale is applied later. With 128 more no byte borrows from the next.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t zero[2];  // of a row, in each byte

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) zero[row] = permute(zeros, 0, row ? 0x1111 : 0);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      registers[i] = (masked_with(nibbles, 0x0f0f0f0f, 0x80808080) - zero[i % 2]) ^ 0x80808080;
    }
  }
};
