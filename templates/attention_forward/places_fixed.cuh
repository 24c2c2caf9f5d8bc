// Tile `tile` of p.q_tiles, the longest first, of a head counted through all batches.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int all_head) {
{% if operation.bias != "none" %}
  // Where all batches have one bias they come one after the other, while L2 has it.
  const bool shared = p.bias_batch == 0;
  const int inner = shared ? p.all_heads / p.heads : p.heads, outer = all_head / inner, rest = all_head - outer * inner;
  const int batch = shared ? rest : outer, head = shared ? outer : rest;
  return { {batch}, head, {{ "(p.q_tiles - 1 - tile)" if bounds_right else "tile" }} * kQTile};
{% else %}
  const int batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, {{ "(p.q_tiles - 1 - tile)" if bounds_right else "tile" }} * kQTile };
{% endif %}
}
