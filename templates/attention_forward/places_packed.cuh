// Tile `tile` of a head, the longest of each sequence first.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int head) {
  const auto [b, begin, end] = owner_of<kQTile>(p.cu_seqlens_q, p.batch, tile, p.q_tiles);
  const int first_row = offset(p.cu_seqlens_q, b, p.total_q), first_column = offset(p.cu_seqlens_k, b, p.total_k);
  const int rows = offset(p.cu_seqlens_q, b + 1, p.total_q) - first_row;
  const int columns = offset(p.cu_seqlens_k, b + 1, p.total_k) - first_column;
{% if bounds_right %}
  const int row = ((rows + kQTile - 1) / kQTile - 1 - tile + begin) * kQTile;
{% else %}
  const int row = (tile - begin) * kQTile;
{% endif %}
  return { {first_row, rows, first_column, columns{{ ", b" if scored or operation.dropout or operation.eight }}}, head, row};
}
