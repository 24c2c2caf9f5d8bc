// Blocks that have columns of a sequence, for one kv head: each counts itself, with work or without. Where a
// sequence has no columns nobody does, and the preprocess kernel has written its dq.
__device__ __forceinline__ int blocks(const Parameters& p, const Sequence& sequence) {
  return (sequence.columns(p) + kKvTile - 1) / kKvTile * (kParts * kCluster);
}

// Loads sums from where others have added to them: L2. L1 is passed by.
__device__ __forceinline__ float4 load_added(const float4* sums) {
  float4 four;
  asm volatile("ld.relaxed.gpu.global.v4.f32 { %0, %1, %2, %3 }, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(sums)
               : "memory");
  return four;
}

// A block that has added all its dq counts itself. Whichever is the last finds that all have, and writes the
// dq of all query heads of the kv head in its sequence. Nobody waits for another block.
__device__ __forceinline__ void store_queries(const Consumer& c) {
  constexpr int kThreads = kConsumers * 128, kAhead = 16 / kPieceFours;
  const Parameters& p = c.p;
  const Work& work = c.work;
  const int thread = threadIdx.x - 128;  // the producer's warpgroup comes first
  await_sums();
  meet();  // what any thread has added comes before what one tells the other blocks
  if (thread == 0) {
    int before;  // releases what this block has added, and acquires what those before have
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before) : "l"(p.finished + work.first_tile) : "memory");
    c.shared.last = before == blocks(p, work.sequence) - 1;
  }
  meet();
  if (!c.shared.last) return;
  const int tiles = (work.sequence.rows(p) + kQTile - 1) / kQTile;
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i)
    convert<kThreads, kAhead>(p, {work.sequence, work.head * p.sharing + i, 0}, work.first_tile + i * p.q_tiles, tiles,
                              thread, load_added);
}
