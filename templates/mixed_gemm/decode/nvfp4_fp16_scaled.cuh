// nvfp4 by fp16: exact (w s) / kUnit, w e2m1 and s e4m3: multiples of 2^-17, and at most 21. The word is in the
// order that bf16 likes (mxfp4_bf16.cuh); here sign, exponent and mantissa belong at bits 15, 11, 10 and 9, and
// mean w 2^-14.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 128;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    const uint32_t factors = multiply_fp16(fp16_of_e4m3(scales, 0), 0x58005800);  // s 2^7
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) factor[row] = both(factors, row);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    constexpr uint32_t kSign = 0x80008000, kRest = 0x0e000e00;
    const uint32_t word = words[0], turned = __funnelshift_r(word, word, 6);
    registers[0] = multiply_fp16((word & kSign) | ((word << 3) & kRest), factor[0]);
    registers[1] = multiply_fp16((turned & kSign) | ((turned << 3) & kRest), factor[1]);
    registers[2] = multiply_fp16(((word << 4) & kSign) | ((word << 7) & kRest), factor[0]);
    const uint32_t rest = ((word << 9) & 0x06000600) | ((word << 1) & 0x08000800);
    registers[3] = multiply_fp16(((word << 6) & kSign) | rest, factor[1]);
  }
};
