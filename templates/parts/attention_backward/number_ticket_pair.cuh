// The index of the block's work: a pair takes one ticket when it begins. Its first block does, and tells the
// other; one thread of each asks.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage& shared) {
  const int part = blockIdx.x % kParts;
  if (part == 0) {
    shared.ticket = atomicAdd(p.counter, 1);
    asm volatile("{\n.reg .b32 ticket, full;\nmapa.shared::cluster.u32 ticket, %0, 1;\n"
                 "mapa.shared::cluster.u32 full, %1, 1;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [ticket], %2, [full];\n}"
                 ::"r"(cute::cast_smem_ptr_to_uint(&shared.ticket)),
                 "r"(cute::cast_smem_ptr_to_uint(&shared.ticket_full)), "r"(shared.ticket)
                 : "memory");
  } else {
    shared.ticket_full.arrive_and_expect_tx(sizeof(shared.ticket));
    shared.ticket_full.wait(0);
  }
  return *reinterpret_cast<volatile int*>(&shared.ticket) * kParts + part;
}
