// Tiles are dealt in advance, there and back: who gets the longest of one round gets the shortest of
// the next.
struct Tiles {
  int round = 0;

  __device__ __forceinline__ explicit Tiles(const Parameters&) {}
  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    const int place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    index = round++ * gridDim.x + place;
    return index < p.tiles;
  }
};
