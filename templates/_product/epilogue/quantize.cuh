// Divides blocks of 128 columns of a row by a scale each, which is stored: their largest magnitude / 448, or
// the next power of two. Blocks of zeros and with infinities have 1; NaN says nothing of a scale and stays NaN.
template <bool kPowerOfTwo> struct Quantize {
  float* scales;
  int64_t pitch;
  static constexpr int kColumns = 128;

  // The largest magnitudes of two rows, of what a thread has seen of them.
  struct Largest {
    float row[2] = {0.f, 0.f};
  };

  // What lies outside of D [m, n] does not count.
  __device__ __forceinline__ static void note(Largest& largest, const float (&x)[2][2],
                                              const Coordinates& at, int n) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (at.column[i % 2] < n) largest.row[i / 2] = fmaxf(largest.row[i / 2], fabsf(x[i / 2][i % 2]));
  }

  // What the rows of a block that starts at a thread's `at` are multiplied by; its scales are stored. The four
  // lanes of a row have two columns of every eight each.
  __device__ __forceinline__ Largest inverse(const Largest& largest, const Coordinates& at, int m,
                                             int n) const {
    Largest found;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float most = largest.row[i];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const bool usual = most > 0.f && most <= 3.40282347e38f;
      float inverse = usual ? fminf(__fdiv_rn(448.f, most), 3.40282347e38f) : 1.f;
      if (kPowerOfTwo) inverse = __int_as_float(__float_as_int(inverse) & 0x7f800000);
      if (threadIdx.x % 4 == 0 && at.row[i] < m && at.column[0] < n)
        scales[at.column[0] / kColumns * pitch + at.row[i]] = __fdiv_rn(1.f, inverse);
      found.row[i] = inverse;
    }
    return found;
  }
};
