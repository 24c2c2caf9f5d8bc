// Arrives at the empty barrier of a stage for this warp, if `there`. Predicated: a branch would serialize wgmma.
__device__ __forceinline__ void release(EmptyBarrier& empty, bool there = true) {
  __syncwarp();
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                   cute::cast_smem_ptr_to_uint(&empty)),
               "r"(int(there && threadIdx.x % 32 == 0))
               : "memory");
}
