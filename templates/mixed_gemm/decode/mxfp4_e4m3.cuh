// mxfp4 by e4m3: exact e2m1; the scale is applied later. The eight magnitudes are a table that one PRMT
// reads four times; then come the signs.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint32_t word = words[j], choice = word & 0x77777777;
      registers[2 * j] = permute(0x3c383000, 0x4c484440, choice) | (word & 0x80808080);
      registers[2 * j + 1] = permute(0x3c383000, 0x4c484440, choice >> 16) | ((word << 4) & 0x80808080);
    }
  }
};
