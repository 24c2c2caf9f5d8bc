// Adds a warpgroup's part of dq to the sums of its q tile. They lie as the accumulators do, four of a
// thread after those of its neighbour, so a warp's are one piece: it stages them and TMA adds them.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  auto& staging = c.shared.sums[warp];
  if (lane == 0) cute::tma_store_wait<0>();  // what was staged before has been read
  __syncwarp();
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i) staging[i][lane] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  cute::tma_store_fence();
  __syncwarp();
  if (lane == 0) {
    float* sums = c.p.dq_sum + int64_t(step.tile * kParts + c.part) * kPartSums + warp * (kQueries * 32);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
                 ::"l"(sums), "r"(cute::cast_smem_ptr_to_uint(staging)), "n"(kQueries * 128), "l"(kEvictLast)
                 : "memory");
    cute::tma_store_arrive();
  }
}

// Nobody waits for a turn.
__device__ __forceinline__ void begin_turns(const Consumer&) {}
__device__ __forceinline__ void finish_turns(const Consumer&) {}
