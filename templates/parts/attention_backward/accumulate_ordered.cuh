// Passes on the turn that the warp has had, if it has not yet.
__device__ __forceinline__ void pass_turn(const Consumer& c, int warp) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // all is added, not just read
  int* owed = c.shared.owed[warp];
  if (owed == nullptr) return;
  asm volatile("fence.proxy.async.global;\nfence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], 1;"
               ::"l"(owed) : "memory");
  c.shared.owed[warp] = nullptr;
}

// Adds a warpgroup's part of dq to the sums of its q tile, after all kv tiles further left have. They lie
// as the accumulators do, four of a thread after those of its neighbour, so a warp's are one piece: it
// stages them, awaits the piece's turn and TMA adds them. The turn is passed on a step later, when that
// is done, and before this warp waits for another: a warp only ever waits for blocks with lower numbers.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  auto& staging = c.shared.sums[warp];
  if (lane == 0) pass_turn(c, warp);
  __syncwarp();
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i) staging[i][lane] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  cute::tma_store_fence();
  __syncwarp();
  const int piece = (step.tile * kParts + c.part) * (kConsumers * 4) + warp;
  int* turns = c.p.turns + piece;
  int passed;
  do {  // all lanes ask: after a loop of one alone the compiler takes nothing for uniform
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(passed) : "l"(turns) : "memory");
  } while (!__all_sync(~0u, passed == turn(c.p, c.work, step.row)));
  if (lane == 0) {
    float* sums = c.p.dq_sum + int64_t(piece) * (kQueries * 32);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // what is added now comes after what was waited for
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
                 ::"l"(sums), "r"(cute::cast_smem_ptr_to_uint(staging)), "n"(kQueries * 128), "l"(kEvictLast)
                 : "memory");
    cute::tma_store_arrive();
    c.shared.owed[warp] = turns;
  }
}

__device__ __forceinline__ void begin_turns(const Consumer& c) {
  if (threadIdx.x % 32 == 0) c.shared.owed[c.consumer * 4 + threadIdx.x / 32 % 4] = nullptr;
}
__device__ __forceinline__ void finish_turns(const Consumer& c) {
  if (threadIdx.x % 32 == 0) pass_turn(c, c.consumer * 4 + threadIdx.x / 32 % 4);
}
