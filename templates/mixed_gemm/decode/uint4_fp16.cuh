// uint4 by fp16: exact (q - z). A nibble at bit 0 under the exponent of 1024 is 1024 + q, and one at bit 4
// under that of 64 is 64 + q: one LOP3 takes two, one addition takes the rest away.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;
  uint32_t offset[2];

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    offset[0] = permute(zeros, 0xe4, 0x4040);  // -(1024 + z)
    offset[1] = add_fp16(permute(zeros, 0xe4, 0x4141), 0x63806380);  // and 960: -(64 + z)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = add_fp16(masked_with(words[0], 0x000f000f, 0x64006400), offset[0]);
    registers[1] = add_fp16(masked_with(words[0], 0x00f000f0, 0x54005400), offset[1]);
    registers[2] = add_fp16(masked_with(up, 0x000f000f, 0x64006400), offset[0]);
    registers[3] = add_fp16(masked_with(up, 0x00f000f0, 0x54005400), offset[1]);
  }
};
