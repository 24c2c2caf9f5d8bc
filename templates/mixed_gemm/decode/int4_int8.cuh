// int4 by int8: 16 q, which is a nibble at the top of a byte; the scale is applied later.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 0.0625f;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      registers[i] = (i % 2 ? words[i / 2] : words[i / 2] << 4) & 0xf0f0f0f0;
  }
};
