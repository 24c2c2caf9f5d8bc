// Tile `tile` of p.q_tiles, the longest first, of a head counted through all batches.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int all_head) {
  const int batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (kBoundsRight ? p.q_tiles - 1 - tile : tile) * kQTile };
}
