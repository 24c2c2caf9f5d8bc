// Lays dq of q tiles down as `accumulate` does, and has them converted as the postprocess kernel and a block do.
// The including file holds the constants, `four_at`, `unpack` and `convert`, as they were rendered.
#include <cstdio>
#include <vector>

// Lays one part of a q tile down; its value is 2048 times its row in the head, and its column.
static int lay(float* sums, int first_row, int first_column) {
  for (int consumer = 0; consumer < kConsumers; ++consumer)
    for (int thread = 0; thread < 128; ++thread)
      for (int j = 0; j < kQueries; ++j) {
        const int warp = thread / 32, lane = thread % 32;
        // wgmma gives lane l of a warp rows l / 4 and l / 4 + 8 of 16, and of every 8 columns 2 (l % 4) and the next.
        const int of_64 = consumer / kQuerySplits * kWgmmaM + warp * 16 + lane / 4 + j / 2 % 2 * 8;
        const int of_n = consumer % kQuerySplits * kQueryN + j / 4 * 8 + lane % 4 * 2 + j % 2;
#ifdef SWAPPED
        const int row = of_n, column = of_64;
#else
        const int row = of_64, column = of_n;
#endif
        float& place = sums[(consumer * 4 + warp) * (kQueries * 32) + (j / 4 * 32 + lane) * 4 + j % 4];
        if (place != -1) return std::printf("two accumulators lie in one place\n"), 1;
        place = (first_row + row) * 2048 + first_column + column;
      }
  return 0;
}

// Converts q tiles [begin, end) of the `tiles` of head 1, which begin with number 2.
template <int kThreads, int kAhead> static int problem(int tiles, int begin, int end, int rows, int dim) {
  std::vector<float> sums((2 + tiles) * kParts * kPartSums, -1);
  for (int tile = 0; tile < tiles; ++tile)
    for (int part = 0; part < kParts; ++part)
      if (lay(sums.data() + ((2 + tile) * kParts + part) * kPartSums, tile * kQTile, part * kColumns)) return 1;
  const int pitch = kDim + 8, head = tiles * kQTile * pitch;
  std::vector<Element> dq(2 * head);
  const Parameters p{sums.data(), dq.data(), 0, head, pitch, dim, rows, 0.5f};
  for (int thread = 0; thread < kThreads; ++thread)
    convert<kThreads, kAhead>(p, { {}, 1, begin * kQTile}, 2 + begin, end - begin, thread,
                              [&](const float4* four) { return *four; });
  for (int row = -tiles * kQTile; row < tiles * kQTile; ++row)
    for (int column = 0; column < pitch; ++column) {
      const Element& one = dq[head + row * pitch + column];
      const bool inside = row >= begin * kQTile && row < end * kQTile && row < rows && column < dim;
      const float wanted = inside ? 0.5f * (row * 2048 + column) : -1;
      if (one.value != wanted || one.times != inside)
        return std::printf("%d rows, dim %d: row %d, column %d is %g, not %g, written %d times\n", rows, dim, row, column, one.value, wanted, one.times), 1;
    }
  return 0;
}

int main() {
  for (int dim : {8, kDim - 24, kDim})
    for (int rows : {1, 9, kQTile - 1, kQTile})
      for (int tiles : {1, 2, 5}) {
        const int all = (tiles - 1) * kQTile + rows;
        if (problem<256, 1>(tiles, tiles - 1, tiles, all, dim)) return 1;
        if (problem<256, 1>(tiles, tiles / 2, tiles / 2 + 1, all, dim)) return 1;
        if (problem<kConsumers * 128, 16 / kPieceFours>(tiles, 0, tiles, all, dim)) return 1;
        if (problem<kConsumers * 128, 16 / kPieceFours>(tiles, 0, (tiles + 1) / 2, all, dim)) return 1;
      }
  return 0;
}
