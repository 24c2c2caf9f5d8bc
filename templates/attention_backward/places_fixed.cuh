// Where a kv tile is: its sequence and kv head, its first column, and the number of its first query
// head's first q tile, in the storage of statistics and sums.
struct KvPlace {
  Sequence sequence;
  int head, column, first_tile;
};
__device__ __forceinline__ KvPlace place_kv(const Parameters& p, int tile, int all_kv_head) {
{% if operation.bias != "none" %}
  // Where all batches have one bias they come one after the other, while L2 has it.
  const bool shared = p.bias_batch == 0;
  const int kv_heads = p.heads / p.sharing, inner = shared ? p.all_kv_heads / kv_heads : kv_heads;
  const int outer = all_kv_head / inner, rest = all_kv_head - outer * inner;
  const int batch = shared ? rest : outer, head = shared ? outer : rest;
  return { {batch}, head, tile * kKvTile, (batch * kv_heads + head) * p.sharing * p.q_tiles};
{% else %}
  const int kv_heads = p.heads / p.sharing, batch = all_kv_head / kv_heads;
  return { {batch}, all_kv_head - batch * kv_heads, tile * kKvTile, all_kv_head * p.sharing * p.q_tiles};
{% endif %}
}

// Where the q tile with that number is.
__device__ __forceinline__ Place place_q(const Parameters& p, int number) {
  const int all_head = number / p.q_tiles, batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (number - all_head * p.q_tiles) * kQTile};
}
{% if operation.bias != "none" %}

// Where a row of k begins that rows of q at a place attend to.
__device__ __forceinline__ int64_t key_at(const Parameters& p, const Place& at, int column) {
  return at.sequence.batch * p.k_batch + at.head / p.sharing * p.k_head + column * p.k_seq;
}
{% endif %}
