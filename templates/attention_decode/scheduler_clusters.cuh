// An item is a tile of rows of one sequence and KV head, and the tiles of keys of this CTA: from `begin` to
// `end` of `weight`, the first of which is tile `first` of the sequence's keys.
struct Item {
  Sequence sequence;
  int batch, head, row_tile;
  int begin, end, first, weight;

  __device__ __forceinline__ int begin_key(const Parameters& p) const { return sequence.begin(p, 0); }
  __device__ __forceinline__ int end_key(const Parameters& p) const { return sequence.end(p, sequence.rows - 1); }
};

// Goes through a cluster's range of items: its CTAs divide the keys of each.
struct TileScheduler : SequenceScan {
  int at, stop;  // what is left of the range

  __device__ __forceinline__ explicit TileScheduler(const Parameters& p) {
    const Division division(total(p), gridDim.x / kCluster);
    at = division.begin(blockIdx.x / kCluster);
    stop = division.begin(blockIdx.x / kCluster + 1);
    add_up(0);
  }

  // An item is the cluster's, and each of its CTAs has an equal share of the keys, which may be none.
  __device__ __forceinline__ bool next(const Parameters& p, Item& item) {
    if (at >= stop) return false;
    const int from = find(p, at);
    item.sequence = own.of_lane(from);
    item.batch = base + from;
    const Sequence::Tiles tiles = item.sequence.tiles(p);
    item.first = tiles.first;
    item.weight = max(1, tiles.count);
    const int row_tiles = item.sequence.row_tiles(p);
    const int start = __shfl_sync(~0u, through, from) - row_tiles * p.kv_heads, index = at - start;
    item.head = index;
    if (row_tiles > 1) item.head = quotient(index, row_tiles);
    item.row_tile = index - item.head * row_tiles;
    const int rank = blockIdx.x % kCluster;
    item.begin = item.weight * rank / kCluster;
    item.end = item.weight * (rank + 1) / kCluster;
    ++at;
    return true;
  }
};
