// e4m3 by bf16: exact. A byte extended by its sign to 16 bits and moved up by 4 has sign, exponent and
// mantissa where bf16 has them, and means w 2^-120; e4m3's subnormal numbers are bf16's. One multiplication
// undoes it.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t extended = permute(words[i / 2], 0, i % 2 ? 0xb3a2 : 0x9180);
      registers[i] = multiply_bf16((extended << 4) & 0x87f087f0, 0x7b807b80);
    }
  }
};
