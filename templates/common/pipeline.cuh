// A position in a ring of buffers. The phase is the parity that the next wait looks for: it flips
// each time the ring wraps, so a barrier needs no reset.
template <int kCount> struct Ring {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};
using Position = Ring<kStages>;
