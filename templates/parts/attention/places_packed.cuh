// Tile `tile` of a head, the longest of each sequence first.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int head) {
  const int sequence = sequence_of<kQTile>(p.cu_seqlens_q, p.batch, tile);
  const int first_row = p.cu_seqlens_q[sequence], rows = p.cu_seqlens_q[sequence + 1] - first_row;
  const int first_column = p.cu_seqlens_k[sequence], columns = p.cu_seqlens_k[sequence + 1] - first_column;
  tile -= first_row / kQTile + sequence;
  const int row = (kBoundsRight ? (rows + kQTile - 1) / kQTile - 1 - tile : tile) * kQTile;
  return { {first_row, rows, first_column, columns}, head, row};
}
