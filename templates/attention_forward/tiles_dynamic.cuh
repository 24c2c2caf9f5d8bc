// A CTA takes the next tile that nobody has, one tile ahead of need: the answer takes its time, and
// nothing may be computed from it before. Every tile is asked for once, with which the counter is back at
// 0 for the next launch.
struct Tiles {
  int taken = blockIdx.x - gridDim.x;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    index = gridDim.x + taken;
    if (index < p.tiles) taken = atomicInc(p.counter, p.tiles - 1);
    return index < p.tiles;
  }
};
