// ---- Producer: one thread keeps q, k and v coming -------------------------------------------------
// The tile called `index`, in the order in which tiles are worked off:
{{- " by sections of heads whose k and v fit L2" if bounds_right else " head by head." }}
{% if bounds_right %}
// together; within one the longest tiles of all its heads, then the next.
{% endif %}
__device__ __forceinline__ Work locate(const Parameters& p, int index) {
  const int section = index / (p.section * p.q_tiles), offset = index - section * p.section * p.q_tiles;
{% if bounds_right %}
  const int heads = min(p.section, p.all_heads - section * p.section);
  const int tile = offset / heads, all_head = section * p.section + offset % heads;
{% else %}
  const int tile = offset % p.q_tiles, all_head = section * p.section + offset / p.q_tiles;
{% endif %}
  const auto [sequence, head, row] = place(p, tile, all_head);
{% if operation.trims %}
  // Where the mask is of pairs any key may be shown, and any hidden.
  const int all_columns = sequence.columns(p);
  const int4 keys = p.shown_row == 0 ? keys_of(p, Score::number_of(sequence), head) : make_int4(0, all_columns, 0, 0);
  const int columns = min(all_columns, keys.y);
{% else %}
  const int columns = sequence.columns(p);
{% endif %}
{% if diagonal %}
  const int diagonal = sequence.diagonal(p);
{% endif %}
{% if bounds_right %}
  const int end = max(0, min(columns, min(row + kQTile, sequence.rows(p)){{ diagonal }} + p.right));
{% else %}
  const int end = columns;
{% endif %}
{% if operation.trims %}
  const int begin = max(0, min(end, {{ "max(row%s - p.left, keys.x)" | format(diagonal) if bounds_left else "max(0, keys.x)" }}));
{% if mask_alone %}
  // Beyond the sequence's end columns are hidden whatever the mask says.
  const int shown_end = (keys.w >= all_columns ? all_columns + kKvTile - 1 : keys.w) / kKvTile;
  return {1, row, head, sequence, begin / kKvTile, (end + kKvTile - 1) / kKvTile,
          (keys.z + kKvTile - 1) / kKvTile, shown_end};
{% else %}
  return {1, row, head, sequence, begin / kKvTile, (end + kKvTile - 1) / kKvTile};
{% endif %}
{% elif bounds_left %}
  const int begin = max(0, min(end, row{{ diagonal }} - p.left));
  return {1, row, head, sequence, begin / kKvTile, (end + kKvTile - 1) / kKvTile};
{% else %}
  return {1, row, head, sequence, 0, (end + kKvTile - 1) / kKvTile};
{% endif %}
}

// The share of one warpgroup, whose rows begin at `row`.
__device__ __forceinline__ Work share(const Parameters& p, Work work, int row) {
  work.row = row;
  const int columns = work.sequence.columns(p);
{% if diagonal %}
  const int diagonal = work.sequence.diagonal(p);
{% endif %}
{% if bounds_right %}
  const int full_end = max(0, min(columns, row{{ diagonal }} + p.right + 1));
  work.full_end = max(work.begin, full_end / kKvTile);
{% else %}
  work.full_end = max(work.begin, columns / kKvTile);
{% endif %}
{% if bounds_left %}
  const int full_begin = max(0, row + kWgmmaM - 1{{ diagonal }} - p.left);
  work.full_begin = max(work.begin, (full_begin + kKvTile - 1) / kKvTile);
{% endif %}
{% if bounds_right %}
  // The last tiles may be for rows further down alone.
  const int end = min(columns, min(row + kWgmmaM, work.sequence.rows(p)){{ diagonal }} + p.right);
{% if operation.trims %}
  work.skipped = max(0, work.end - max(work.begin, (end + kKvTile - 1) / kKvTile));
{% else %}
  work.skipped = work.end - max(work.begin, (end + kKvTile - 1) / kKvTile);
{% endif %}
  work.end -= work.skipped;
{% endif %}
  return work;
}

__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier& full, EmptyBarrier& empty,
                                     uint32_t phase, uint8_t* tile, const Sequence& sequence, int n, int head) {
  empty.wait(phase);
  full.arrive_and_expect_tx(kStageBytes);
  Tile<kKvTile>::load(map, full, kEvictLast, tile, sequence.columns_at<kKvTile>(n * kKvTile), head);
}

{% if values_apart %}
__device__ __forceinline__ void load_values(const Parameters& p, FullBarrier& full, EmptyBarrier& empty, uint32_t phase,
                                            uint8_t* tile, const Sequence& sequence, int n, int head) {
  empty.wait(phase);
  full.arrive_and_expect_tx(Values::kBytes);
  Values::load(p.v_map, full, tile, sequence, n * kKvTile, head);
}

{% endif %}
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared) {
  Tiles tiles;
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  Ring<kQStages> q{0, 1};
  for (int index; tiles.next(p, index);) {
    const Work work = locate(p, index);
    if (work.row < 0 || work.row >= work.sequence.rows(p)) continue;
    const int head = work.head / p.sharing;
    // In the order of use: the scores of a tile are multiplied before the output of the tile before.
    if (work.end > work.begin)
      load(p.k_map, shared.k_full[position.stage], shared.k_empty[position.stage], position.phase,
           shared.k[position.stage], work.sequence, work.end - 1, head);
    CUTE_NO_UNROLL
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = work.row + consumer * kWgmmaM;
      FullBarrier& full = shared.q_full[q.stage][consumer];
      shared.q_empty[q.stage][consumer].wait(q.phase);
      shared.work[q.stage][consumer] = share(p, work, row);
      full.arrive_and_expect_tx(kQBytes);  // releases the work too
      Tile<kWgmmaM>::load(p.q_map, full, kEvictFirst, shared.q[q.stage][consumer],
                          work.sequence.rows_at<kWgmmaM>(row), work.head);
    }
    CUTE_NO_UNROLL
    for (int n = work.end - 1; n >= work.begin; --n) {
      const Position before = position;
      position.advance();
      if (n > work.begin)
        load(p.k_map, shared.k_full[position.stage], shared.k_empty[position.stage], position.phase,
             shared.k[position.stage], work.sequence, n - 1, head);
{% if values_apart %}
      load_values(p, shared.v_full[before.stage], shared.v_empty[before.stage], before.phase, shared.v[before.stage],
                  work.sequence, n, head);
{% else %}
      load(p.v_map, shared.v_full[before.stage], shared.v_empty[before.stage], before.phase,
           shared.v[before.stage], work.sequence, n, head);
{% endif %}
    }
    q.advance();
  }
  CUTE_NO_UNROLL
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    shared.q_empty[q.stage][consumer].wait(q.phase);
    shared.work[q.stage][consumer].more = {{ "shared.work[q.stage][consumer].skipped = " if skips }}0;
    shared.q_full[q.stage][consumer].arrive();
  }
}
