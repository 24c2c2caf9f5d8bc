// ---- Persistent blocks: each takes the next tile that nobody has -----------------------------------
// The first q and do of a tile are loaded while the gradients of the tile before leave through the memory of
// k and v. Tiles are told in two places by turns: when one is told where another was, all have let go of that
// one's k and v (`kv_empty`), and so of what was told.
__device__ __forceinline__ void produce_tiles(const Parameters& p, SharedStorage& shared) {
  const int all = p.kv_tiles * p.all_kv_heads;
  Progress progress{0, 0, 1};  // a fresh barrier counts as having passed the phase before
  CUTE_NO_UNROLL
  for (int index = blockIdx.x; index < all;) {
    Work& work = shared.works[progress.tiles % 2];
    work = locate(p, index);
    if (work.column < work.sequence.columns(p)) {
      FullBarrier& work_full = shared.work_full[progress.tiles % 2];
      if (work.begin < work.end) {
        work_full.arrive();
        produce(p, shared, work, progress);
      } else {  // all are done with it at once; nobody may be a phase ahead
        await_kv(shared, progress.tiles);
        shared.k_full.arrive();
        shared.v_full.arrive();
        work_full.arrive();
      }
      ++progress.tiles;
    }
    index = gridDim.x + atomicAdd(p.counter, 1);  // the consumers have steps to do until the answer is there
  }
  shared.works[progress.tiles % 2].head = -1;  // no more
  shared.work_full[progress.tiles % 2].arrive();
}

__device__ __forceinline__ void consume_tiles(const Parameters& p, SharedStorage& shared, int consumer) {
  Progress progress{0, 0, 0};
  CUTE_NO_UNROLL
  for (;; ++progress.tiles) {
    shared.work_full[progress.tiles % 2].wait(progress.tiles / 2 & 1);
    const Work& work = shared.works[progress.tiles % 2];
    if (work.head < 0) break;
    consume(p, shared, work, consumer, progress);
    release(shared.kv_empty);
  }
}
