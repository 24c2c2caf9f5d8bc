// Walks what an emitted GEMM with stream_k walks, on the host, and holds it against what must be: every k tile of
// every tile once, and nobody waits for who may not have begun. The including file has those parts.
#include <cstdio>

static const char* broken(const Parameters& p, int tiles, int k_tiles, int clusters) {
  std::vector<int> times(size_t(tiles) * k_tiles);
  std::vector<int> leaves(clusters, -1), from(clusters), taken(clusters);  // the tile of a cluster's part
  std::vector<std::map<int, int>> finishes(clusters);  // the first k tile of each tile that it finishes
  for (int cluster = 0; cluster < clusters; ++cluster) {
    Walk walk(p, tiles, k_tiles, cluster, clusters);
    bool finished = false;
    for (Unit unit; walk.next(unit);) {
      if (unit.tile < 0 || unit.tile >= tiles || unit.k_tiles() < 1) return "a unit is of nothing";
      if (unit.begin < 0 || unit.end > k_tiles) return "a unit reaches beyond its tile";
      for (int k_tile = unit.begin; k_tile < unit.end; ++k_tile) ++times[size_t(unit.tile) * k_tiles + k_tile];
      if (unit.end == k_tiles) {
        finishes[cluster][unit.tile] = unit.begin;
        finished = true;
        continue;
      }
      if (leaves[cluster] >= 0) return "a cluster has one place, and leaves two parts";
      if (finished) return "a cluster waits for others before it leaves its own part";
      leaves[cluster] = unit.tile;
      from[cluster] = unit.begin;
    }
  }
  for (int count : times)
    if (count != 1) return "a k tile is not multiplied once";
  for (int cluster = 0; cluster < clusters; ++cluster) {
    const Walk walk(p, tiles, k_tiles, cluster, clusters);
    for (const auto& [tile, begin] : finishes[cluster]) {
      if (begin == 0) continue;
      int reached = 0;
      for (int other = walk.first(tile); other < cluster; ++other) {
        if (other < 0 || leaves[other] != tile || from[other] < reached) return "a part is not there, or not in order";
        reached = from[other];
        ++taken[other];
      }
    }
  }
  for (int cluster = 0; cluster < clusters; ++cluster)
    if (taken[cluster] != (leaves[cluster] >= 0)) return "a part is not taken once";
  return nullptr;
}

int main() {
  for (int tiles, k_tiles, clusters; true;) {
    Parameters p{};
    if (std::scanf("%d %d %d %d", &p.cut, &tiles, &k_tiles, &clusters) != 4) return 0;
    if (const char* why = broken(p, tiles, k_tiles, clusters)) {
      std::printf("%d of %d tiles cut, %d k tiles, %d clusters: %s\n", p.cut, tiles, k_tiles, clusters, why);
      return 1;
    }
  }
}
