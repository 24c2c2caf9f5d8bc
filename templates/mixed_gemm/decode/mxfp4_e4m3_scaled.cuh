// mxfp4 by e4m3: exact, times 2^d of its group, -5 <= d <= 6: `scales` has d of both rows as signed bytes.
// The eight magnitudes are a table that one PRMT reads four times; then come the signs.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t low[2], high[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      const uint32_t more = uint32_t(int(int8_t(scales >> 8 * row)));  // to each exponent, but that of 0
      low[row] = more * 0x08080800 + 0x3c383000, high[row] = more * 0x08080808 + 0x4c484440;
    }
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint32_t word = words[j], choice = word & 0x77777777;
      registers[2 * j] = permute(low[0], high[0], choice) | (word & 0x80808080);
      registers[2 * j + 1] = permute(low[1], high[1], choice >> 16) | ((word << 4) & 0x80808080);
    }
  }
};
