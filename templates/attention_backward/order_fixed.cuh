// To the dq of a q tile kv tiles add from left to right, the longest of a causal mask first, or leftward. Blocks wait
// for blocks with lower numbers only, and take numbers when they begin: so none waits for one that may never begin.

// The q tile in place n of [begin, end): from the last on, with which kv tiles further left begin as well; leftward
// from a kv tile's first on, which those further right that see it begin before.
__device__ __forceinline__ int walk(const Parameters& p, const Work& work, int n) {
  return p.leftward ? n : work.begin + work.end - 1 - n;
}

// How many kv tiles add to the dq of the q tile that begins with `row` before the block's own.
__device__ __forceinline__ int turn(const Parameters& p, const Work& work, int row) {
  const Sequence& sequence = work.sequence;
{% if operation.trims %}
  const int own = work.column / kKvTile, columns = min(work.keys_end, sequence.columns(p));
{% else %}
  const int own = work.column / kKvTile, columns = sequence.columns(p);
{% endif %}
{% if diagonal %}
  const int diagonal = sequence.diagonal(p);
{% endif %}
  if (p.leftward) {  // from the last column that one of the tile's rows attends to
{% if bounds_right %}
    const int rows = min(row + kQTile, sequence.rows(p));
    return (min(columns, rows{{ diagonal }} + p.right) - 1) / kKvTile - own;
{% else %}
    return (columns - 1) / kKvTile - own;
{% endif %}
  }
{% if operation.trims %}
  const int first = {{ "max(work.keys_begin, row%s - p.left)" | format(diagonal) if bounds_left else "work.keys_begin" }};
  return own - first / kKvTile;  // from the row's first column
{% elif bounds_left %}
  return own - max(0, row{{ diagonal }} - p.left) / kKvTile;  // from the row's first column
{% else %}
  return own;
{% endif %}
}
