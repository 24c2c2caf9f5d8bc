// e4m3 by fp16: exact; the multiprocessor converts two at a time.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      registers[i] = fp16_of_e4m3(words[i / 2], i % 2);
  }
};
