// Walks what an emitted GEMM with split_k walks, on the host, and holds it against what must be: every k tile of every
// tile once, in the part that it is stored as. The including file has those parts.
#include <cstdio>

static const char* broken(const Parameters& p, int tiles, int k_tiles, int clusters) {
  std::vector<int> part_of(size_t(tiles) * k_tiles, -1);
  std::set<std::pair<int, int>> stored;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    Walk walk(p, tiles, k_tiles, cluster, clusters);
    for (Unit unit; walk.next(unit);) {
      if (unit.tile < 0 || unit.tile >= tiles || unit.part < 0 || unit.part >= p.k_parts) return "a unit is of no tile";
      if (unit.k_tiles() < 1 || unit.begin < 0 || unit.end > k_tiles) return "a unit has no k tile, or one beyond";
      if (unit.k_tiles() - k_tiles / p.k_parts > 1) return "a part is longer than others by more than one";
      if (!stored.emplace(unit.tile, unit.part).second) return "a part is stored twice";
      for (int k_tile = unit.begin; k_tile < unit.end; ++k_tile) {
        int& part = part_of[size_t(unit.tile) * k_tiles + k_tile];
        if (part >= 0) return "a k tile is multiplied twice";
        part = unit.part;
      }
    }
  }
  if (stored.size() != size_t(tiles) * p.k_parts) return "a part is not stored";
  for (size_t i = 0; i < part_of.size(); ++i) {
    if (part_of[i] < 0) return "a k tile is not multiplied";
    if (i % k_tiles && part_of[i] < part_of[i - 1]) return "parts are not in the order of k";
  }
  return nullptr;
}

int main() {
  for (int tiles, k_tiles, clusters; true;) {
    Parameters p{};
    if (std::scanf("%d %d %d %d", &p.k_parts, &tiles, &k_tiles, &clusters) != 4) return 0;
    if (const char* why = broken(p, tiles, k_tiles, clusters)) {
      std::printf("%d parts of %d tiles, %d k tiles, %d clusters: %s\n", p.k_parts, tiles, k_tiles, clusters, why);
      return 1;
    }
  }
}
