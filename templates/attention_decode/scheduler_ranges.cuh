// An item is a tile of rows of one sequence and KV head, and the tiles of keys of this CTA: from `begin` to
// `end` of `weight`, the first of which is tile `first` of the sequence's keys. Where these are not all, their
// result is one of `parts` partial results.
//
// An example: three items of 8 tiles on five CTAs. These have 5, 5, 5, 5 and 4 of the 24 tiles: item 0 is in
// parts of 5 (CTA 0) and 3 (CTA 1), item 1 of 2 (CTA 1), 5 (CTA 2) and 1 (CTA 3), item 2 of 4 (CTA 3) and 4
// (CTA 4).
struct Item {
  Sequence sequence;
  int batch, head, row_tile;
  int begin, end, first, weight;
  int parts, part_place;  // how many CTAs have some of it; where this CTA's partial result is
  int first_place;        // where that of its first part is

  __device__ __forceinline__ int begin_key(const Parameters& p) const { return sequence.begin(p, 0); }
  __device__ __forceinline__ int end_key(const Parameters& p) const { return sequence.end(p, sequence.rows - 1); }
  __device__ __forceinline__ int number(const Parameters& p) const {
    return (batch * p.kv_heads + head) * p.row_tiles + row_tile;
  }
  // Where partial results are: a CTA has the last part of one item at 2 b, and the first of another at 2 b + 1.
  __device__ __forceinline__ int place_of(int part) const { return first_place + 2 * part + (part == 0); }
};

// Goes through a CTA's range of tiles, which may begin and end within items.
struct TileScheduler : SequenceScan {
  Division division;
  int at, stop;  // what is left of the range

  __device__ __forceinline__ explicit TileScheduler(const Parameters& p) : division(total(p), gridDim.x) {
    at = division.begin(blockIdx.x);
    stop = division.begin(blockIdx.x + 1);
    add_up(0);
  }

  // The item of tile `at`, and where it starts.
  __device__ __forceinline__ int locate(const Parameters& p, Item& item) {
    const int from = find(p, at);
    item.sequence = own.of_lane(from);
    item.batch = base + from;
    const Sequence::Tiles tiles = item.sequence.tiles(p);
    item.first = tiles.first;
    item.weight = max(1, tiles.count);
    const int row_tiles = item.sequence.row_tiles(p);
    const int start = __shfl_sync(~0u, through, from) - item.weight * row_tiles * p.kv_heads;
    const int index = quotient(at - start, item.weight);
    item.head = index;
    if (row_tiles > 1) item.head = quotient(index, row_tiles);
    item.row_tile = index - item.head * row_tiles;
    return start + index * item.weight;
  }

  __device__ __forceinline__ bool next(const Parameters& p, Item& item) {
    if (at >= stop) return false;
    const int start = locate(p, item);
    item.begin = at - start;
    item.end = min(item.weight, stop - start);
    at = start + item.end;
    return true;
  }

  // What other CTAs have of the last item: how many they are, and where the partial results go.
  __device__ __forceinline__ void share(Item& item) const {
    const bool whole = item.begin == 0 && item.end == item.weight;
    const int start = at - item.end, first = division.owner(start);
    item.parts = whole ? 1 : division.owner(start + item.weight - 1) - first + 1;
    item.first_place = 2 * first;
    item.part_place = 2 * blockIdx.x + (item.begin == 0 ? 1 : 0);
  }
};
