// Reads offsets of groups of k as an emitted kernel of 8 bits does, and walks the tiles of all D: each has the k tiles
// of its group, from where this begins on, or one of zeros. The including file has those parts.
static Parameters given;
static GroupTable table;

static const char* broken() {
  const Parameters& p = given;
  const GroupedTiles tiles(p, table);
  const int past = (p.k + kTileK - 1) / kTileK * kTileK;
  std::vector<int> begins(p.batches), ends(p.batches), times(p.batches);
  for (int group = 0, end = 0; group < p.batches; ++group) {  // by plain words
    begins[group] = end;
    const int own = std::min(std::max(p.offsets[group], 0), p.k);
    end = std::min(past, (own + kTileK - 1) / kTileK * kTileK);
    ends[group] = end;
  }
  for (int index = 0; index < tiles.count(); ++index) {
    for (int rank = 0; rank < kClusterM * kClusterN; ++rank) {
      const TileCoord at = tiles.at(index, rank);
      if (at.batch < 0 || at.batch >= p.batches) return "a tile is of no group";
      if (at.m < p.m && at.n < p.n) ++times[at.batch];
      const int begin = begins[at.batch], end = ends[at.batch];
      if (begin == end) {
        if (at.k_tiles != 1 || at.k_begin < p.k) return "an empty group has k tiles that are not zeros";
      } else if (at.k_begin != begin || at.k_tiles != (end - begin) / kTileK) {
        return "a tile has k tiles of another group";
      }
      if (at.k_begin % kTileK) return "a k tile begins beside the others";
    }
  }
  const int all = (p.m + kTileM - 1) / kTileM * ((p.n + kTileN - 1) / kTileN);
  for (int one : times)
    if (one != all) return "a tile of D is not computed once";
  return nullptr;
}

int main() {
  while (std::scanf("%d %d %d %d", &given.m, &given.n, &given.k, &given.batches) == 4) {
    std::vector<int> offsets(given.batches);
    for (int& one : offsets) std::scanf("%d", &one);
    given.offsets = offsets.data();
    table.fill(given);
    if (const char* why = broken()) {
      std::printf("%d of k, %d groups: %s\n", given.k, given.batches, why);
      return 1;
    }
  }
}
