// uint4 by bf16: exact (q - z) / kUnit. As int4_bf16.cuh, with the row's zero point for the 8.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 64;
  uint32_t offset[2];

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)  // the byte in both halves is z 2^-133
      offset[row] = multiply_bf16(permute(zeros, 0, row ? 0x4141 : 0x4040), 0xff00ff00);  // -2^127
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = fma_bf16(words[0] & 0x000f000f, 0x7f007f00, offset[0]);
    registers[1] = fma_bf16(words[0] & 0x00f000f0, 0x7d007d00, offset[1]);
    registers[2] = fma_bf16(up & 0x000f000f, 0x7f007f00, offset[0]);
    registers[3] = fma_bf16(up & 0x00f000f0, 0x7d007d00, offset[1]);
  }
};
