// The second consumer runs two k tiles behind the first: otherwise both would promote accumulators, and later
// run their epilogue, at the same time, and the tensor core would idle. Named barrier 3 lets the second start;
// barrier 4 tells the first that it has.
struct OrderedBarrier {
  static constexpr int kSteps = 2;  // 1 hides less, 3 leaves too few stages to the producer
  int consumer;

  __device__ __forceinline__ explicit OrderedBarrier(int consumer) : consumer(consumer) {
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  __device__ __forceinline__ void begin() const {
    cutlass::arch::NamedBarrier::sync(256, consumer == 0 ? 4 : 3);
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  // After the MMAs of a k tile.
  __device__ __forceinline__ void multiplied(int k_tile, int k_tiles) const {
    if (consumer == 0 && k_tile + 1 == min(kSteps, k_tiles)) cutlass::arch::NamedBarrier::arrive(256, 3);
  }

  // The second consumer's last arrival must not stay pending.
  __device__ __forceinline__ void finish() const {
    if (consumer == 0) cutlass::arch::NamedBarrier::sync(256, 4);
  }
};
