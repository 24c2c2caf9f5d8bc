// A tile of which a mask of keys shows nothing is left out, and no other waits for it.
__device__ __forceinline__ void trim(const Parameters& p, Work& work) {
  if (p.shown_row != 0 || work.begin >= work.end) return;
  const int tile_end = min(work.column + kKvTile, work.sequence.columns(p));
  int begin = 0x7fffffff, end = 0;  // of what any head that shares the tile shows
  bool hides = false;
  CUTE_NO_UNROLL
  for (int i = 0; i < (p.keys_head == 0 ? 1 : p.sharing); ++i) {
    const int4 keys = keys_of(p, Score::number_of(work.sequence), work.head * p.sharing + i);
    if (keys.x < keys.y) begin = min(begin, keys.x), end = max(end, keys.y);
    hides |= keys.z > work.column || keys.w < tile_end;
  }
{% if mask_alone %}
  work.hides = hides;
{% endif %}
{% if operation.deterministic %}
  work.keys_begin = begin;
  work.keys_end = end;
{% endif %}
  if (begin >= tile_end || end <= work.column) work.begin = work.end = 0;
}
