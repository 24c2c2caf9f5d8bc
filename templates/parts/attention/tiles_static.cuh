// Tiles are dealt in advance, there and back: who gets the longest of one round gets the shortest of
// the next.
struct Tiles {
  int round = 0;

  __device__ __forceinline__ explicit Tiles(const Parameters&) {}
  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    if (kTry_deal && kBoundsRight) {
      // Each section is dealt by itself, and every second one from the other end.
      const int whole = p.section * p.q_tiles, rounds = (whole + gridDim.x - 1) / gridDim.x;
      for (;; ++round) {
        const int section = round / rounds, turn = round - section * rounds, first = section * whole;
        if (first >= p.tiles) return false;
        const int offset = turn * gridDim.x + ((section + turn) % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (offset >= min(whole, p.tiles - first)) continue;
        ++round;
        index = first + offset;
        return true;
      }
    }
    const int place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    index = round++ * gridDim.x + place;
    return index < p.tiles;
  }
};
