// A unit of work: the k tiles from `begin` to `end` of one tile, which are part `part` of its k.
struct Unit {
  int tile, part, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The split-K scheduler: the k tiles of every tile are split into p.k_parts parts, equal but for one k tile.
// The first parts of all tiles come first, then the second ones, so that units that run at the same time read
// A and B at the same k.
struct Walk {
  int tiles, k_tiles, parts, clusters;
  int following;  // the next unit

  __device__ __forceinline__ Walk(const Parameters& p, int tiles, int k_tiles, int cluster, int clusters)
      : tiles(tiles), k_tiles(k_tiles), parts(p.k_parts), clusters(clusters), following(cluster) {}

  // The first k tile of a part.
  __device__ __forceinline__ int start(int part) const {
    return part * (k_tiles / parts) + min(part, k_tiles % parts);
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (following >= tiles * parts) return false;
    const int part = following / tiles;
    unit = {following - part * tiles, part, start(part), start(part + 1)};
    following += clusters;
    return true;
  }
};
