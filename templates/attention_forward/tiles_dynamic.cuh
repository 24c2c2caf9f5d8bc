// The tile scheduler: each CTA takes its next tile from a counter in global memory, one tile ahead, which hides
// the latency of the atomic. A launch increments the counter once for each tile, so that it wraps to 0 for the
// next launch.
struct Tiles {
  int taken = blockIdx.x - gridDim.x;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    index = gridDim.x + taken;
    if (index < p.tiles) taken = atomicInc(p.counter, p.tiles - 1);
    return index < p.tiles;
  }
};
