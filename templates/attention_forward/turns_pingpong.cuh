// The warpgroups take turns at issuing products, in a ring: one's softmax then runs under the others'
// products. Named barrier 4 + w opens the turn of warpgroup w.
struct Turns {
  int consumer;

  __device__ __forceinline__ explicit Turns(int consumer) : consumer(consumer) {
    if (consumer == kConsumers - 1) pass();  // warpgroup 0 begins
  }
  __device__ __forceinline__ void begin() const { cutlass::arch::NamedBarrier::sync(256, 4 + consumer); }
  __device__ __forceinline__ void pass() const {
    cutlass::arch::NamedBarrier::arrive(256, 4 + (consumer == kConsumers - 1 ? 0 : consumer + 1));
  }
  // The last pass opened a turn that nobody takes: it must not be left pending.
  __device__ __forceinline__ void finish() const {
    if (consumer == 0) begin();
  }
};
