// The index of the block's work: a pair takes one ticket when it begins. Its first block does, and tells the
// other; one thread of each asks.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage& shared) {
  if (blockIdx.x % kParts > 0) {
    shared.ticket_full.arrive_and_expect_tx(sizeof(shared.ticket));
    shared.ticket_full.wait(0);
    return *const_cast<volatile int*>(&shared.ticket) * kParts + 1;
  }
  const int ticket = atomicAdd(p.counter, 1);
  asm volatile("{\n.reg .b32 place, full;\nmapa.shared::cluster.u32 place, %0, 1;\n"
               "mapa.shared::cluster.u32 full, %1, 1;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %2, [full];\n}"
               ::"r"(cute::cast_smem_ptr_to_uint(&shared.ticket)),
               "r"(cute::cast_smem_ptr_to_uint(&shared.ticket_full)), "r"(ticket)
               : "memory");
  return ticket * kParts;
}
