// e4m3 by fp16: w s, rounded once; the multiprocessor converts two at a time.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(scales, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      registers[i] = multiply_fp16(fp16_of_e4m3(words[i / 2], i % 2), factor[i % 2]);
  }
};
