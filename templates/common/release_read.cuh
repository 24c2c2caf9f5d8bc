// A warp gives a stage back that it read by itself. The fence orders its reads before what TMA writes there next: an
// arrival alone does not wait for reads that were issued before it, and where processes take turns on a GPU, TMA was
// seen to overwrite the end of a stage that was still being read.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}
