// A unit of work: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The stream-K scheduler. The k tiles of the first p.cut tiles, one tile after another, are split into a range
// for each cluster, equal but for one k tile; then clusters take every clusters-th of the other tiles whole.
// 3 tiles of 8 k tiles on 4 clusters: ranges 0-5, 6-11, 12-17, 18-23. Cluster 1 has the end of tile 0 and the
// first half of tile 1: it adds cluster 0's partial sums to tile 0, and writes its own of tile 1 for cluster 2.
// A range is walked from its last tile to its first, so that partial sums for others come first: a cluster
// waits for clusters of lower index only, whose CTAs start before its own.
struct Walk {
  int k_tiles, tiles, clusters;
  int shared;     // k tiles of all ranges
  int low, high;  // the rest of this cluster's range
  int whole;      // the next whole tile

  __device__ __forceinline__ Walk(const Parameters& p, int tiles, int k_tiles, int cluster, int clusters)
      : k_tiles(k_tiles),
        tiles(tiles),
        clusters(clusters),
        shared(p.cut * k_tiles),
        low(start(cluster)),
        high(start(cluster + 1)),
        whole(p.cut + cluster) {}

  // The first k tile of a cluster's range.
  __device__ __forceinline__ int start(int cluster) const { return cluster * shared / clusters; }

  // The cluster whose range has the first k tile of a split tile.
  __device__ __forceinline__ int first(int tile) const {
    return ((tile * k_tiles + 1) * clusters - 1) / shared;
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (low < high) {
      const int tile = (high - 1) / k_tiles, start = tile * k_tiles;
      unit = {tile, max(low - start, 0), high - start};
      high = start + unit.begin;
      return true;
    }
    unit = {whole, 0, k_tiles};
    whole += clusters;
    return unit.tile < tiles;
  }
};
