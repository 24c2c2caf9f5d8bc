// Divides each row by the root of a mean of squares, of which `shares` has one for each 16 of k.
struct RmsScale {
  const float* shares;
  int64_t pitch;
  float eps;
  const float* factors = nullptr;  // of rows from `first` on, in shared memory
  int first = -1;
  static constexpr int kColumns = 16;
  struct Operand {
    float row[2];
  };

  // Adds up the shares of kRows rows of D from `row` on, before the products of their tile: kThreads threads
  // meet at `barrier`, and leave a factor for each row in `shared`.
  template <int kRows, int kThreads>
  __device__ __forceinline__ void prepare(float* shared, int row, int m, int k, int barrier) {
    if (row == first) return;  // those of the tile before
    constexpr int kWarps = kThreads / 32, kAtOnce = kRows > kWarps ? 2 : 1, kGroups = 8;  // in flight
    const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, groups = (k - 1) / kColumns + 1;
    first = row;
    factors = shared;
    cutlass::arch::NamedBarrier::sync(kThreads, barrier);  // all have read the factors of the tile before
    CUTE_NO_UNROLL
    for (int i = warp; i < kRows && row + i < m; i += kAtOnce * kWarps) {
      const float* from[kAtOnce];
      float sum[kAtOnce] = {};
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) from[j] = shares + min(row + i + j * kWarps, m - 1) * pitch;
      CUTE_NO_UNROLL
      for (int group = lane; group < groups; group += 32 * kGroups) {
        float share[kGroups * kAtOnce];  // past the end of the last group: predicates are few
        CUTE_UNROLL
        for (int j = 0; j < kGroups * kAtOnce; ++j)
          share[j] = from[j % kAtOnce][min(group + j / kAtOnce * 32, groups - 1)];
        CUTE_UNROLL
        for (int j = 0; j < kGroups * kAtOnce; ++j)
          sum[j % kAtOnce] += group + j / kAtOnce * 32 < groups ? share[j] : 0.f;
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        CUTE_UNROLL
        for (int lanes = 16; lanes > 0; lanes /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], lanes);
        if (lane == 0 && i + j * kWarps < kRows) shared[i + j * kWarps] = rsqrtf(sum[j] + eps);
      }
    }
    cutlass::arch::NamedBarrier::sync(kThreads, barrier);
  }

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int) const {
    return {at.row[0] < m ? factors[at.row[0] - first] : 0.f, at.row[1] < m ? factors[at.row[1] - first] : 0.f};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= operand.row[i / 2];
  }
};
