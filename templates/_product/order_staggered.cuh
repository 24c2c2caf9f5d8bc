// The consumers share each tile, the second two steps behind the first: else both would add up in fp32, and
// later finish the tile, at the same time, and the tensor core would wait. Named barrier 3 lets the second
// begin; by 4 the first knows that it has.
struct Order {
  static constexpr int kSteps = 2;  // 1 hides less, 3 leaves too few stages to the producer
  int consumer;

  __device__ __forceinline__ Order(int consumer, int, Position&) : consumer(consumer) {
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  __device__ __forceinline__ void begin() const {
    cutlass::arch::NamedBarrier::sync(256, consumer == 0 ? 4 : 3);
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  // The consumer has the products of a tile k.
  __device__ __forceinline__ void multiplied(int k_tile, int k_tiles) const {
    if (consumer == 0 && k_tile + 1 == min(kSteps, k_tiles)) cutlass::arch::NamedBarrier::arrive(256, 3);
  }

  __device__ __forceinline__ void pass(Position&) const {}

  // The second's last word must not be left pending.
  __device__ __forceinline__ void finish(int) const {
    if (consumer == 0) cutlass::arch::NamedBarrier::sync(256, 4);
  }
};
