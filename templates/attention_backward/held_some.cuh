// The warpgroup's 64 rows of v, of the first columns or all, in registers: the products of every step would
// read them from shared memory again.
struct Held {
  static constexpr int kSteps = {{ layout.held_steps }};  // of 16 columns
  uint32_t rows[kSteps][4];  // as wgmma takes its A: a warp's 16 rows by 16 columns, by quarters

  __device__ __forceinline__ void take(const Consumer& c) {
    c.shared.v_full.wait(0);
    const int lane = threadIdx.x % 32, row = c.consumer * kWgmmaM + threadIdx.x / 32 % 4 * 16 + lane % 16;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int offset = row * kSpan + step * 32 % kSpan + lane / 16 * 16;
      const uint32_t address = cute::cast_smem_ptr_to_uint(c.shared.v) + step * 32 / kSpan * Tile<kKvRows>::kBoxBytes +
                               (offset ^ ((offset >> 3) & (kSpan - 16)));  // TMA's swizzle
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                   : "=r"(rows[step][0]), "=r"(rows[step][1]), "=r"(rows[step][2]), "=r"(rows[step][3])
                   : "r"(address)
                   : "memory");
    }
  }

  // Issues dp^T = v do^T.
  __device__ __forceinline__ void multiply(const Consumer& c, float (&dp)[kScores], uint64_t d_o) const {
    fence(dp);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kDim / HeldWgmma::kK; ++step) {
      const uint64_t columns = d_o + Tile<kQTile>::columns(step);
      if (step < kSteps)
        HeldWgmma::fma(rows[step], columns, dp, step > 0);
      else
        ScoresWgmma::fma(c.v + c.own + Tile<kKvRows>::columns(step), columns, dp, step > 0);
    }
    cute::warpgroup_commit_batch();
  }
};
