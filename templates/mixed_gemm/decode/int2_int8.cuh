// int2 by int8: 64 q, which is two bits at the top of a byte; the scale is applied later.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 0.015625f;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) registers[i] = (words[0] << (6 - 2 * i)) & 0xc0c0c0c0;
  }
};
