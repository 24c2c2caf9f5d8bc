// ---- Producer: one thread keeps q and do coming --------------------------------------------------
{% include "attention_backward/values_" ~ schedule.cluster_split ~ ".cuh" %}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, const Work& work) {
  if (work.begin >= work.end) return;
  const int column = work.column{{ " + work.part * kKvRows" if shares_rows }};
  const Corner columns = work.sequence.columns_at<kKvRows>(column);
  shared.k_full.arrive_and_expect_tx(kKvBytes);
  Tile<kKvRows>::load(p.k_map, shared.k_full, kEvictFirst, shared.k, columns, work.head);
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
{% if single_do %}
  uint32_t parity = 1;
{% endif %}
{% if operation.blocks %}
  bool first = true;
{% endif %}
  CUTE_NO_UNROLL
  for (int i = {{ rank }}; i < p.sharing; {{ next_head }}) {
    const int head = work.head * p.sharing + i;
{% if operation.blocks %}
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n) {
      const int4 listed = list.entries[n];
      const int m = listed.x;
{% else %}
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n) {
      const int m = walk(p, work, n);
{% endif %}
      const Corner rows = work.sequence.rows_at<kQTile>(m * kQTile);
{% if branches %}
      const bool non_finite = p.non_finite[work.first_tile + i * p.q_tiles + m] != 0;  // before waits, to be there early
{% elif operation.masks_rows %}
      // Read before waits, to be there early.
      const auto& do_map = p.non_finite[work.first_tile + i * p.q_tiles + m] ? p.dq_map : p.do_map;
{% endif %}
{% if single_do %}
      const Position of_do{0, parity};  // q has more stages
{% endif %}
      FullBarrier &q_full = shared.q_full[position.stage], &do_full = shared.do_full[{{ "of_do" if single_do else "position" }}.stage];
      shared.q_empty[position.stage].wait(position.phase);
{% if operation.blocks %}
      shared.mask[position.stage] = listed.y;  // released with what comes next
{% if schedule.accumulate == "direct" %}
      shared.tile[position.stage] = work.first_tile + i * p.q_tiles + m;
{% endif %}
{% endif %}
      q_full.arrive_and_expect_tx(kQBytes + kStatisticsBytes);
      Tile<kQTile>::load(p.q_map, q_full, kEvictLast, shared.q[position.stage], rows, head);
      cute::SM90_TMA_LOAD_2D::copy(&p.statistics_map, reinterpret_cast<uint64_t*>(&q_full), kEvictLast,
                                   shared.statistics[position.stage].rows, 0, kStatistics * (work.first_tile + i * p.q_tiles + m));
{% if operation.blocks %}
      if (first) load_values(p, shared, work, columns);
      first = false;
{% else %}
      if (i == {{ rank }} && n == work.begin) load_values(p, shared, work, columns);
{% endif %}
      shared.do_empty[{{ "of_do" if single_do else "position" }}.stage].wait({{ "of_do" if single_do else "position" }}.phase);
      do_full.arrive_and_expect_tx({{ do_bytes }});
{% if branches %}
      if (non_finite)  // by a branch: there is no register for the address of a map
        {{ value_tile }}<kQTile>::load(p.dq_map, do_full, kEvictLast, shared.d_o[{{ "of_do" if single_do else "position" }}.stage], rows, head);
      else
        {{ value_tile }}<kQTile>::load(p.do_map, do_full, kEvictLast, shared.d_o[{{ "of_do" if single_do else "position" }}.stage], rows, head);
{% else %}
      {{ value_tile }}<kQTile>::load({{ "do_map" if operation.masks_rows else "p.do_map" }}, do_full, kEvictLast, shared.d_o[{{ "of_do" if single_do else "position" }}.stage], rows, head);
{% endif %}
      position.advance();
{% if single_do %}
      parity ^= 1;
{% endif %}
    }
  }
}
