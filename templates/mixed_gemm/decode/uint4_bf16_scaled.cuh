// uint4 by bf16: (q - z) s, rounded once: z s alone would be rounded, so the difference comes first.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 64;
  uint32_t offset[2], factor[2];

  __device__ __forceinline__ Decode(uint32_t scales, uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      offset[row] = multiply_bf16(permute(zeros, 0, row ? 0x4141 : 0x4040), 0xff00ff00);  // z 2^-133 by -2^127
      factor[row] = both(scales, row);
    }
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = multiply_bf16(fma_bf16(words[0] & 0x000f000f, 0x7f007f00, offset[0]), factor[0]);
    registers[1] = multiply_bf16(fma_bf16(words[0] & 0x00f000f0, 0x7d007d00, offset[1]), factor[1]);
    registers[2] = multiply_bf16(fma_bf16(up & 0x000f000f, 0x7f007f00, offset[0]), factor[0]);
    registers[3] = multiply_bf16(fma_bf16(up & 0x00f000f0, 0x7d007d00, offset[1]), factor[1]);
  }
};
