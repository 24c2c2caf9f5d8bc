// Which of a thread's scores its rows attend to, from the mask of a tile: a bit for every row and column. It is
// on its way while the scores are multiplied.
struct Shown {
  static constexpr int kWords = kKvTile / 32;
  uint32_t words[2][kWords];  // of the thread's rows, the first bit being of its first column

  // Of the tile in place n of its list, which has a mask where `masked`.
  __device__ __forceinline__ Shown(const Consumer& c, int n, bool masked) {
    if (!masked) return;
    const auto* mask = reinterpret_cast<const uint2*>(c.p.masks + ((int64_t(c.masks) + n) * kQTile + c.row) * kWords);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; i += 2) {
        const uint2 two = mask[(8 * r * kWords + i) / 2];
        words[r][i] = two.x >> c.column;
        words[r][i + 1] = two.y >> c.column;
      }
    }
  }

  // Hides the other scores.
  __device__ __forceinline__ void hide(float (&scores)[kScores]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int i = 0; i < kScores / 2; ++i) {
        const int place = i / 2 * 8 + i % 2;
        if ((words[r][place / 32] >> place % 32 & 1) == 0) scores[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
      }
    }
  }
};
