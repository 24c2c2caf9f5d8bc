// Lays a gradient of every block of a cluster down and sums it, as the emitted text does, one thread after
// the other. The including file holds the constants, `lay` and `store_sums`, as they were rendered.
#include <cstdio>
#include <vector>

static int value(int rank, int row, int column) { return rank == 0 ? row * kColumns + column : 5 * rank; }

static int problem(int rows, int dim, int part) {
  blocks.assign(kCluster, std::vector<float4>(kFragments * 32, float4{-1, -1, -1, -1}));
  for (int block = 0; block < kCluster; ++block)
    for (threadIdx.x = 0; threadIdx.x < kConsumers * 128; ++threadIdx.x) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      float gradient[kGradients];
      // wgmma gives lane l of a warp rows l / 4 and l / 4 + 8 of 16, and of every 8 columns 2 (l % 4) and the next.
      for (int j = 0; j < kGradients; ++j)
        gradient[j] = value(block, warp * 16 + lane / 4 + j / 2 % 2 * 8, j / 4 * 8 + lane % 4 * 2 + j % 2);
      lay(reinterpret_cast<uint8_t*>(blocks[block].data()), gradient, warp);
    }
  const Parameters p{dim};
  const Work work{ {3 + rows}, 3};
  const int pitch = kDim + 8, tile_rows = kConsumers * 64;
  std::vector<uint16_t> tile(tile_rows * pitch, 0xffff);
  std::vector<int> times(tile.size());
  stored = [&](const void* at) {
    const auto place = static_cast<const uint16_t*>(at) - tile.data();
    for (int i = 0; i < 2; ++i) ++times[place + i];
  };
  for (int block = 0; block < kCluster; ++block)
    for (threadIdx.x = 0; threadIdx.x < kConsumers * 128; ++threadIdx.x) {
      blockIdx.x = 7 * kCluster + block;
      store_sums(Consumer{p, work, part}, nullptr, tile.data(), pitch, 1, threadIdx.x / 32);
    }
  int others = 0;
  for (int block = 1; block < kCluster; ++block) others += 5 * block;
  for (int row = 0; row < tile_rows; ++row)
    for (int column = 0; column < pitch; ++column) {
      const int own = column - part * kColumns, found = tile[row * pitch + column];
      const bool inside = row < rows && own >= 0 && own < kColumns && column < dim;
      const int wanted = inside ? value(0, row, own) + others : 0xffff;
      if (found != wanted || times[row * pitch + column] != inside)
        return std::printf("%d rows, dim %d, part %d: row %d, column %d is %d, not %d, stored %d times\n", rows, dim, part, row, column, found, wanted, times[row * pitch + column]), 1;
    }
  return 0;
}

int main() {
  for (int rows : {1, 8, 9, 63, 64, 65, 127, 128, 1000})
    for (int dim : {8, kDim - 24, kDim - 8, kDim})
      for (int part = 0; part < kParts; ++part)
        if (problem(rows, dim, part)) return 1;
  return 0;
}
