// Loads what a thread has of a tile; what is past the ends of x are zeros.
__device__ __forceinline__ void load(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  const int row = row0 + threadIdx.x / kLanes * kDown, column = column0 + threadIdx.x % kLanes * kValues;
  const bool is_aligned = aligned(p.x, p.x_pitch);
  const X* from = p.x + row * p.x_pitch + column;
  if (is_aligned && row0 + kTile <= p.m && column0 + kTile <= p.n) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, kValues, true);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, row + i < p.m ? p.n - column : 0, is_aligned);
  }
}
