// A position in the ring of stages. The phase is the parity that the next wait looks for: it flips
// each time the ring wraps, so a barrier needs no reset.
struct Position {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};
