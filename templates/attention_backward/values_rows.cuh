// Starts the load of v, and of the peer's rows of k for dq: of the columns that the block adds.
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, const Work& work,
                                            Corner columns) {
  shared.v_full.arrive_and_expect_tx({{ v_bytes }} + kKvBytes / kParts);
  {{ value_tile }}<kKvRows>::load(p.v_map, shared.v_full, kEvictFirst, shared.v, columns, work.head);
  const Corner peer = work.sequence.columns_at<kKvRows>(work.column + (1 - work.part) * kKvRows);
  CUTE_NO_UNROLL
  for (int box = 0; box < kBoxes / kParts; ++box)
    load_box(p.k_map, shared.v_full, kEvictFirst, shared.peer_k + box * Tile<kKvRows>::kBoxBytes,
             work.part * kColumns + box * kBoxColumns, peer, work.head);
}
