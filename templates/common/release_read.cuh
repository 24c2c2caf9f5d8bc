// A warp gives a stage back that it read by itself; `last` is what it read last, or came of that. The arrival has it as
// an operand, since an arrival alone does not wait for reads that were issued before it: where processes take turns on a
// GPU, TMA was seen to overwrite the end of a stage that was still being read.
__device__ __forceinline__ void release_read(EmptyBarrier& empty, uint32_t last) {
  __syncwarp();
  asm volatile("{\n.reg .pred first;\n.reg .b32 count;\nsetp.eq.u32 first, %1, 0;\n"
               "and.b32 count, %2, %1;\nadd.u32 count, count, 1;\n"  // 1 in the first lane
               "@first mbarrier.arrive.shared::cta.b64 _, [%0], count;\n}" ::"r"(
                   cute::cast_smem_ptr_to_uint(reinterpret_cast<uint64_t*>(&empty))),
               "r"(threadIdx.x % 32), "r"(last)
               : "memory");
}
