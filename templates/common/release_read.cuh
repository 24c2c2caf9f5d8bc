// Releases a stage that this warp has read by ld.shared. The proxy fence orders these generic reads before the writes
// of the next TMA load: without it TMA was seen to overwrite the end of a stage, where processes share a GPU in turns.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}
