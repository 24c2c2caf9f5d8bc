// Adds a warpgroup's part of dq to the sums of its q tile. They lie as the accumulators do, four of a
// thread after those of its neighbour.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  float* sums = c.p.dq_sum + int64_t(step.tile * kParts + c.part) * kPartSums + warp * (kQueries * 32) + lane * 4;
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], { %1, %2, %3, %4 };" ::"l"(sums + i * 128), "f"(dq[4 * i]),
                 "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                 : "memory");
}
