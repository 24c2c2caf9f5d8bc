// Tiles are dealt in advance, there and back: who gets the longest of one round gets the shortest of the
// next. Where tiles differ in length each section is dealt by itself, and every second one from the other
// end: a round that ran on into the next section would give the same blocks the long ones again.
struct Tiles {
  int round = 0;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    const int whole = {{ "p.section * p.q_tiles" if bounds_right else "p.tiles" }}, rounds = (whole + gridDim.x - 1) / gridDim.x;
    for (;;) {
      const int section = round / rounds, turn = round - section * rounds, first = section * whole;
      if (first >= p.tiles) return false;
      const int offset = turn * gridDim.x + ((section + turn) % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      ++round;
      index = first + offset;
      if (offset < min(whole, p.tiles - first)) return true;
    }
  }
};
