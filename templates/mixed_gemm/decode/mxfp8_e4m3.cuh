// mxfp8 by e4m3: the words are the registers; the scale is applied later.
struct Decode {
  static constexpr int kWords = 4;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) registers[i] = words[i];
  }
};
