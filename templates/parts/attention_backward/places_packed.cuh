// What follows the last sequence counts as one more: of rows without columns where q is concerned, else of
// columns without rows. So its gradients come out as 0, and nothing of it is computed with.
//
// Where a kv tile is: its sequence and kv head, its first column, and the number of its first query
// head's first q tile, in the storage of statistics and sums.
struct KvPlace {
  Sequence sequence;
  int head, column, first_tile;
};
__device__ __forceinline__ KvPlace place_kv(const Parameters& p, int tile, int kv_head) {
  const int b = sequence_of<kKvTile>(p.cu_seqlens_k, p.batch + 1, tile);
  const bool after = b == p.batch;
  const int first_row = p.cu_seqlens_q[b], rows = after ? 0 : p.cu_seqlens_q[b + 1] - first_row;
  const int first_column = p.cu_seqlens_k[b], columns = (after ? p.total_k : p.cu_seqlens_k[b + 1]) - first_column;
  return { {first_row, rows, first_column, columns}, kv_head, (tile - first_column / kKvTile - b) * kKvTile,
           kv_head * p.sharing * p.q_tiles + first_row / kQTile + b};
}

// Where the q tile with that number is.
__device__ __forceinline__ Place place_q(const Parameters& p, int number) {
  const int head = number / p.q_tiles, tile = number - head * p.q_tiles;
  const int b = sequence_of<kQTile>(p.cu_seqlens_q, p.batch + 1, tile);
  const int first_row = p.cu_seqlens_q[b], rows = (b == p.batch ? p.total_q : p.cu_seqlens_q[b + 1]) - first_row;
  return { {first_row, rows, 0, 0}, head, (tile - first_row / kQTile - b) * kQTile};
}
