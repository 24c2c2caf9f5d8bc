// mxfp4 by fp16: exact e2m1 / kUnit, without arithmetic: fp16 is subnormal below 2^-14. The word is in the
// order that bf16 likes (mxfp4_bf16.cuh); here sign, exponent and mantissa belong at bits 15, 11, 10 and 9.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 16384;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    constexpr uint32_t kSign = 0x80008000, kRest = 0x0e000e00;
    const uint32_t word = words[0], turned = __funnelshift_r(word, word, 6);
    registers[0] = (word & kSign) | ((word << 3) & kRest);
    registers[1] = (turned & kSign) | ((turned << 3) & kRest);
    registers[2] = ((word << 4) & kSign) | ((word << 7) & kRest);
    registers[3] = ((word << 6) & kSign) | ((word << 9) & 0x06000600) | ((word << 1) & 0x08000800);
  }
};
