// Eight columns of a row, as they are read and written.
struct alignas(16) Eight {
  Element values[8];
};

// Writes dq in 16 bits, by rows: scale times the sums, of `tiles` q tiles of a head, one after the other from
// `at` on. The first has this number. Each of kThreads threads takes kAhead pieces at a time, and `load`s all
// of them before it writes any.
template <int kThreads, int kAhead, class Load>
__device__ __forceinline__ void convert(const Parameters& p, const Place& at, int number, int tiles, int thread,
                                        Load&& load) {
  const int rows = at.sequence.rows(p) - at.row, count = tiles * (kParts * kPieces);
  const auto* sums = reinterpret_cast<const float4*>(p.dq_sum + int64_t(number) * (kParts * kPartSums));
  Element* dq = p.dq_rows + at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, at.row);
  for (int first = thread; first < count; first += kAhead * kThreads) {
    float4 fours[kAhead][kPieceFours];
    CUTE_UNROLL
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int piece = min(first + ahead * kThreads, count - 1);
      const float4* part_sums = sums + int64_t(piece / kPieces) * (kPartSums / 4);
      CUTE_UNROLL
      for (int i = 0; i < kPieceFours; ++i) fours[ahead][i] = load(part_sums + four_at(piece % kPieces, i));
    }
    CUTE_UNROLL
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int piece = first + ahead * kThreads, part = piece / kPieces;  // counted through all tiles
      if (piece >= count) break;
      unpack(fours[ahead], piece % kPieces, [&](int tile_row, int part_column, const float (&values)[8]) {
        const int row = part / kParts * kQTile + tile_row, column = part % kParts * kColumns + part_column;
        if (row >= rows || column >= p.dim) return;
        Eight eight;
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) eight.values[i] = Element(values[i] * p.scale);
        *reinterpret_cast<Eight*>(dq + row * p.dq_seq + column) = eight;
      });
    }
  }
}
