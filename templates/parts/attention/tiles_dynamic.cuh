// A block takes the next tile that nobody has, one tile ahead of need: the answer takes its time, and
// nothing may be computed from it before.
struct Tiles {
  int taken = blockIdx.x - gridDim.x;

  __device__ __forceinline__ explicit Tiles(const Parameters&) {}
  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    index = gridDim.x + taken;
    if (index < p.tiles) taken = atomicAdd(p.counter, 1);
    return index < p.tiles;
  }
};
