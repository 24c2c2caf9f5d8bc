// Walks of all clusters, for numbers of tiles that only the device knows: each k tile has one cluster, and who
// finishes a tile waits for just those clusters that have a part of it, all of them before itself.
int main() {
  for (int clusters : {1, 3, 20, 132, 264})
    for (int k_tiles : {1, 2, 23, 100})
      for (int tiles : {0, 1, 2, 5, 19, 131, 132, 133, 500, 1055, 1056, 1057, 3000})
        for (int few : {0, 4 * clusters}) {
          const Parameters p{few};
          std::vector<std::vector<int>> owner(tiles, std::vector<int>(k_tiles, -1));
          std::vector<std::vector<int>> left(tiles);
          for (int cluster = 0; cluster < clusters; ++cluster) {
            Walk walk(p, tiles, k_tiles, cluster, clusters);
            int parts = 0;
            for (Unit unit; walk.next(unit);) {
              if (unit.tile >= tiles || unit.begin >= unit.end) return std::puts("no unit"), 1;
              for (int k = unit.begin; k < unit.end; ++k) {
                if (owner[unit.tile][k] != -1) return std::puts("walked twice"), 1;
                owner[unit.tile][k] = cluster;
              }
              if (unit.end < k_tiles) left[unit.tile].push_back(cluster), ++parts;
              if (unit.end == k_tiles && unit.begin > 0)
                for (int other = walk.first(unit.tile); other < cluster; ++other) {
                  bool there = false;
                  for (int one : left[unit.tile]) there |= one == other;
                  if (!there) return std::printf("%d waits for %d, which leaves no part\n", cluster, other), 1;
                }
            }
            if (parts > 1) return std::puts("two parts for one place"), 1;
          }
          for (int tile = 0; tile < tiles; ++tile)
            for (int k = 0; k < k_tiles; ++k)
              if (owner[tile][k] == -1) return std::puts("not walked"), 1;
        }
  return 0;
}
