// Tile `tile` of a head, the longest of each sequence first.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int head) {
  const auto [b, begin, end] = owner_of<kQTile>(p.cu_seqlens_q, p.batch, tile, p.q_tiles);
  const Sequence sequence =
      between(offset(p.cu_seqlens_q, b, p.total_q), offset(p.cu_seqlens_q, b + 1, p.total_q),
              offset(p.cu_seqlens_k, b, p.total_k), offset(p.cu_seqlens_k, b + 1, p.total_k));
  tile -= begin;
  const int row = (kBoundsRight ? (sequence.row_count + kQTile - 1) / kQTile - 1 - tile : tile) * kQTile;
  return {sequence, head, row};
}
