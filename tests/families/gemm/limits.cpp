// Runs what an emitted GEMM counts with on the host, built so that a sum beyond 32 bits ends the program. The
// including file holds those parts, as they were rendered, and k_tiles(p).
#include <cstdio>

static int blocks_last(const Parameters& p, int clusters) {
  const Tiles tiles(p);
  const int count = tiles.count(), step = kConsumers / kSharing * clusters, loaded = k_tiles(p);
  int sum = (kSplit * loaded - 1) * kTileK;  // where the last k tile begins
  for (int first = 0; first < step && first < count; first += step > 1 ? step - 1 : 1) {
    const int last = first + (count - 1 - first) / step * step;
    for (int tile : {first, last})
      for (int rank = 0; rank < kClusterM * kClusterN; ++rank) {
        const TileCoord at = tiles.at(tile, rank);
        if (at.m < 0 || at.n < 0) return 1;
        sum ^= at.m + kTileM ^ at.n + kTileN;
      }
    volatile int next = last;
    next = next + step;  // as the loop does, to find that there is none
    if (next < count) return 1;
  }
  return sum == -1;
}

int main() {
  for (int clusters; true;) {
    Parameters p{};
    int batches;
    if (std::scanf("%d %d %d %d %d", &p.m, &p.n, &p.k, &batches, &clusters) != 5) return 0;
#ifdef BATCHED
    p.batches = batches;
#endif
    if (blocks_last(p, clusters)) return 1;
  }
}
