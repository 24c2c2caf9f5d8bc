// What follows the last sequence counts as one more: of rows without columns where q is concerned, else of columns
// without rows. So its gradients come out as 0, and nothing of it is computed with.

// Where a kv tile is: its sequence and kv head, its first column, and the number of its first query head's first q
// tile, in the storage of statistics and sums.
struct KvPlace { Sequence sequence; int head, column, first_tile; };
__device__ __forceinline__ KvPlace place_kv(const Parameters& p, int tile, int kv_head) {
  const auto [b, begin, end] = owner_of<kKvTile>(p.cu_seqlens_k, p.batch + 1, tile, p.kv_tiles);
  const bool after = b == p.batch;
  const int first_row = offset(p.cu_seqlens_q, b, p.total_q), first_column = offset(p.cu_seqlens_k, b, p.total_k);
  const int rows = after ? 0 : offset(p.cu_seqlens_q, b + 1, p.total_q) - first_row;
  const int columns = (after ? p.total_k : offset(p.cu_seqlens_k, b + 1, p.total_k)) - first_column;
  return { {first_row, rows, first_column, min(columns, (end - begin) * kKvTile){{ ", b" if scored or operation.dropout }}}, kv_head, (tile - begin) * kKvTile,
           kv_head * p.sharing * p.q_tiles + (b == 0 ? 0 : first_row / kQTile + b)};
}

// Where the q tile with that number is.
__device__ __forceinline__ Place place_q(const Parameters& p, int number) {
  const int head = number / p.q_tiles, tile = number - head * p.q_tiles;
  const auto [b, begin, end] = owner_of<kQTile>(p.cu_seqlens_q, p.batch + 1, tile, p.q_tiles);
  const int first_row = offset(p.cu_seqlens_q, b, p.total_q);
  const int rows = (b == p.batch ? p.total_q : offset(p.cu_seqlens_q, b + 1, p.total_q)) - first_row;
{% if operation.bias == "none" %}
  return { {first_row, rows, 0, 0{{ ", b" if operation.dropout }}}, head, (tile - begin) * kQTile};
}
{% else %}
  const int first_column = offset(p.cu_seqlens_k, b, p.total_k);
  const int columns = b == p.batch ? 0 : offset(p.cu_seqlens_k, b + 1, p.total_k) - first_column;
  return { {first_row, rows, first_column, columns, b}, head, (tile - begin) * kQTile};
}

// Where a row of k begins that rows of q at a place attend to.
__device__ __forceinline__ int64_t key_at(const Parameters& p, const Place& at, int column) {
  return at.head / p.sharing * p.k_head + (at.sequence.first_column + column) * p.k_seq;
}
{% endif %}
