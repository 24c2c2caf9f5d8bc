// Where CTA `rank` of the cluster has what this one has at `own`.
__device__ __forceinline__ uint32_t of_rank(const void* own, int rank) {
  return cute::set_block_rank(cute::cast_smem_ptr_to_uint(own), rank);
}

// Puts an item's values, or maximum and sum, where CTA `rank` has `own`, whose barrier counts the bytes.
__device__ __forceinline__ void send(float4& own, const float4& values, FullBarrier& full, int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4}, [%5];" ::"r"(
                   of_rank(&own, rank)),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(of_rank(&full, rank))
               : "memory");
}
__device__ __forceinline__ void send(float2& own, const float2& sums, FullBarrier& full, int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], { %1, %2}, [%3];" ::"r"(
                   of_rank(&own, rank)),
               "f"(sums.x), "f"(sums.y), "r"(of_rank(&full, rank))
               : "memory");
}

// Warps that have other keys of the same rows add up what they have, and then CTAs of the cluster do, each a
// share of the columns that the others send it: always in the same order.
struct Merge {
  static constexpr int kFours = kMerged / 4, kRowFours = kDim / 4;  // of a row: of those left at a time, and of all
  const Parameters& p;
  SharedStorage& shared;
  const Item& item;
  float unit;
  int there = rows_there(p, item), rank = blockIdx.x % kCluster;

  // Adds up what the cluster has of an item; `phase` is that of the barrier that counts what comes.
  __device__ __forceinline__ void store(const Outputs& outputs, const Rows& rows, float exponent, int warp,
                                        uint32_t phase) const {
    const int groups = there * (kRowFours / kGroup), own = (groups - rank + kCluster - 1) / kCluster * kGroup;
    __syncwarp();
    cute::cluster_wait();  // until all have read what was sent of the item before
    // Not earlier: where an item has no keys nothing else holds a warp back, and another one of this CTA may
    // not yet have read the sums of the item before, nor have seen the phase of the barrier that its parts
    // completed.
    if (threadIdx.x == 0)
      shared.parts_full.arrive_and_expect_tx(own * kCluster * int(sizeof(float4) + sizeof(float2)));
    leave_sums(shared, rows, exponent, warp);
    CUTE_UNROLL
    for (int part = 0; part < kDim / kMerged; ++part) {
      if (part > 0) synchronise_warps();
      leave(shared.merged[warp], outputs, part);
      synchronise_warps();
      CUTE_NO_UNROLL
      for (int i = threadIdx.x; i < there * kFours; i += kWarps * 32) {
        const int row = i / kFours, four = part * kFours + i % kFours,
                  group = (row * kRowFours + four) / kGroup;
        const Total total = of_warps(shared, row, i % kFours);
        const int to = group % kCluster, place = group / kCluster * kGroup + four % kGroup;
        send(shared.parts[rank][place], total.value, shared.parts_full, to);
        send(shared.part_sums[rank][place], {total.maximum, total.sum}, shared.parts_full, to);
      }
    }
    shared.parts_full.wait(phase);
    CUTE_NO_UNROLL
    for (int place = threadIdx.x; place < own; place += kWarps * 32) {
      const int at = (place / kGroup * kCluster + rank) * kGroup + place % kGroup;
      finish(p, item, at / kRowFours, at % kRowFours * 4, of_blocks(place), unit);
    }
  }

  __device__ __forceinline__ Total of_blocks(int place) const {
    Total total;
    float2 sums[kCluster];
    float4 values[kCluster];
    CUTE_UNROLL
    for (int from = 0; from < kCluster; ++from) {
      sums[from] = shared.part_sums[from][place];
      values[from] = shared.parts[from][place];
    }
    total.add(sums, values);
    return total;
  }
};
