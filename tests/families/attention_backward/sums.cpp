// Lays dq of one q tile down as `accumulate` does and takes it apart as the postprocess kernel does. The
// including file holds the constants and `unpack`, as they were rendered.
#include <cstdio>
#include <vector>

int main() {
  std::vector<float> sums(kPartSums, -1);
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
        place = row * 1000 + column;
      }
  std::vector<int> taken(kQTile * kColumns);
  int wrong = 0;
  for (int piece = 0; piece < kPieces; ++piece)
    unpack(reinterpret_cast<const float4*>(sums.data()), piece, [&](int row, int column, const float (&values)[8]) {
      for (int i = 0; i < 8; ++i) {
        if (row >= kQTile || column + i >= kColumns) { ++wrong; continue; }
        ++taken[row * kColumns + column + i];
        wrong += values[i] != row * 1000 + column + i;
      }
    });
  if (wrong) return std::printf("%d values are not what they are taken for\n", wrong), 1;
  for (int times : taken)
    if (times != 1) return std::printf("a value is taken %d times\n", times), 1;
  return 0;
}
