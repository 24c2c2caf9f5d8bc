// Starts the load of v.
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, const Work& work,
                                            Corner columns) {
  shared.v_full.arrive_and_expect_tx({{ v_bytes }});
  {{ value_tile }}<kKvRows>::load(p.v_map, shared.v_full, kEvictFirst, shared.v, columns, work.head);
}
