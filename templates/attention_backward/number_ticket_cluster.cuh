// The index of the block's work: a cluster takes one ticket when it begins. Its first block does, and tells the
// others; one thread of each asks. Where blocks share rows each is an index of its own.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage& shared) {
  constexpr int kBlocks = {{ schedule.cluster_size }};
  const int block = blockIdx.x % kBlocks;
  int ticket;
  if (block > 0) {
    shared.ticket_full.arrive_and_expect_tx(sizeof(shared.ticket));
    shared.ticket_full.wait(0);
    ticket = *const_cast<volatile int*>(&shared.ticket);
  } else {
    ticket = atomicAdd(p.counter, 1);
    CUTE_UNROLL
    for (int other = 1; other < kBlocks; ++other)
      asm volatile("{\n.reg .b32 place, full;\nmapa.shared::cluster.u32 place, %0, %3;\n"
                   "mapa.shared::cluster.u32 full, %1, %3;\n"
                   "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %2, [full];\n}"
                   ::"r"(cute::cast_smem_ptr_to_uint(&shared.ticket)),
                   "r"(cute::cast_smem_ptr_to_uint(&shared.ticket_full)), "r"(ticket), "r"(other)
                   : "memory");
  }
{% if schedule.cluster_split == "rows" %}
  return ticket * kBlocks + block;
{% else %}
  return ticket;
{% endif %}
}
