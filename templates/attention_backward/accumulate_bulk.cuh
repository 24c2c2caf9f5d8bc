// dq leaves through two writers, warps beside the producer's: each has every second step's. What the consumers
// lay down one writer adds to the sums of its q tile, all at once, and lets go of the staging as soon as TMA has
{% if operation.deterministic %}
// read it. It waits for its turn at the tile first, and passes the turn on when all is added; meanwhile the other
// writer has the next step's. A block only ever waits for those with lower numbers.
{% else %}
// read it.
{% endif %}
//
// Lays down a warpgroup's part of dq for the step's writer. It lies as the accumulators do, and as the sums do.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  c.shared.sums_empty.wait(step.parity ^ 1);
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i)
    c.shared.sums[warp][i][lane] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier lets the writer go
  release(c.shared.sums_full[step.parity]);
}

{% if operation.deterministic %}
__device__ __forceinline__ void await_turn(const int* turns, int turn) {
  int passed;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(passed) : "l"(turns) : "memory");
  while (passed < turn);  // more, where packed offsets decrease and sequences share storage
  asm volatile("fence.proxy.async.global;" ::: "memory");  // what is added now comes after what was waited for
}
__device__ __forceinline__ void pass_turn(int* turns) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // all is added, not just read
  asm volatile("fence.proxy.async.global;\nfence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], 1;"
               ::"l"(turns) : "memory");
}

{% endif %}
// Adds what every second step lays down, the steps whose parity is `writer`.
__device__ __forceinline__ void add(const Parameters& p, SharedStorage& shared, const Work& work, uint32_t writer) {
  uint32_t parity = 0, phase = 0;
  CUTE_NO_UNROLL
  for (int i = {{ rank }}; i < p.sharing; {{ next_head }}) {
{% if operation.blocks %}
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n, parity ^= 1) {
      if (parity != writer) continue;
      const int4 listed = list.entries[n];
      const int m = listed.x, place = (work.first_tile + i * p.q_tiles + m) * kParts + work.part;
{% else %}
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n, parity ^= 1) {
      if (parity != writer) continue;
      const int m = walk(p, work, n), place = (work.first_tile + i * p.q_tiles + m) * kParts + work.part;
{% endif %}
{% if operation.deterministic %}
      await_turn(p.turns + place, {{ "listed.z" if operation.blocks else "turn(p, work, m * kQTile)" }});
{% endif %}
      shared.sums_full[writer].wait(phase);
      phase ^= 1;
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
                   ::"l"(p.dq_sum + int64_t(place) * kPartSums), "r"(cute::cast_smem_ptr_to_uint(shared.sums)),
                   "n"(kPartSums * 4), "l"(kEvictLast)
                   : "memory");
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();  // it is read
      shared.sums_empty.arrive();
{% if operation.deterministic %}
      pass_turn(p.turns + place);
{% endif %}
    }
  }
}
