// A CTA has one tile: the hardware hands them out in the order of the CTAs.
struct Tiles {
  int tile = blockIdx.x;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    index = tile;
    tile = p.tiles;
    return index < p.tiles;
  }
};
