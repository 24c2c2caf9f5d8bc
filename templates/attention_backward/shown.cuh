// Hides what does not attend, which the tile's mask says: for every row of k a bit of each row of q. Who has which
// is said at `Steps`: wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, which are columns of the
// scores, and of every 8 columns, rows of q, 2 (l % 4) and the next.
__device__ __forceinline__ void hide(const Consumer& c, float (&scores)[kScores], int mask) {
  constexpr int kWords = kQTile / 32;
  const int column = c.box * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const uint32_t* words = c.p.masks + (int64_t(mask) * kKvTile + column) * kWords + c.row / 32;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int word = 0; word < kQRows / 32; ++word) {
      const uint32_t shown = words[8 * r * kWords + word] >> threadIdx.x % 4 * 2;
      CUTE_UNROLL
      for (int i = 8 * word; i < 8 * word + 8; ++i) {
        const int place = i / 2 * 8 + i % 2;
        if ((shown >> place % 32 & 1) == 0) scores[i / 2 * 4 + 2 * r + i % 2] = __uint_as_float(kHidden);
      }
    }
  }
}
