// Ping-pong: consumers issue MMAs in turns, in a ring, so that one's softmax runs under the others' MMAs (CUTLASS:
// OrderedSequenceBarrier). Consumer w begins after named barrier 4 + w, at which the one before it arrives.
struct Turns {
  int consumer;

  __device__ __forceinline__ explicit Turns(int consumer) : consumer(consumer) {
    if (consumer == kConsumers - 1) pass();  // warpgroup 0 begins
  }
  __device__ __forceinline__ void begin() const { cutlass::arch::NamedBarrier::sync(256, 4 + consumer); }
  __device__ __forceinline__ void pass() const {
    cutlass::arch::NamedBarrier::arrive(256, 4 + (consumer == kConsumers - 1 ? 0 : consumer + 1));
  }
  // The last pass opens a turn that no consumer takes: its arrival must not stay pending.
  __device__ __forceinline__ void finish() const {
    if (consumer == 0) begin();
  }
};
