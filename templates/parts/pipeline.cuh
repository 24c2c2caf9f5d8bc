// A position in the ring of stages. The phase is the parity that the next wait looks for: it flips
// each time the ring wraps, so a barrier needs no reset.
struct Position {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  __device__ __forceinline__ void skip(int stages) {
    stage += stages;
    phase ^= stage / kStages % 2;
    stage %= kStages;
  }
};
