// ---- Dropout: which weights are dropped --------------------------------------------------------------
// A function of state, batch, head, row and column alone, so that every tile of either pass finds the same.
// A patch is 16 rows by 16 columns, in 8 words of 32 weights. That of row 8 h + 2 i + r and column 8 a + 4 g + 2 b + c
// has a bit of word 2 i + g: 16 h + 8 c + 7 - 4 r - 2 b - a, 1 where it is dropped. A thread of the forward pass has
// all h, c and a of a word, one of the backward pass all h, r and a.
//
// A weight is dropped where its number, of 8 random bits, is at least the threshold: 2^8 keep, rounded down or up as
// one more number says, so that each is kept with probability keep to 2^-16. Random words are of one bit of the
// numbers of 32 weights, which are compared at once, from the lowest bit on.
// Words 0 to 3 share the two lowest bits and the number that rounds, and so do words 4 to 7: these count where the six
// bits above equal the threshold's, once in 2^6. docs/families/attention_forward.md says how much that correlates.
//
// Philox4x32 (Salmon et al., 2011; in 7 rounds, the fewest that pass BigCrush) draws the states of two congruential
// generators modulo 2^64 for each patch, whose upper halves are the words: 27 of each. The multiplier is of Steele and
// Vigna ("Computationally easy, spectrally good multipliers for congruential pseudorandom number generators", 2022).
struct Dropout {
  // Of the state and of the threshold, in shared memory: a thread has no registers to keep what all have.
  struct alignas(16) Shared {
    uint2 key;
    uint32_t share, unused;  // of 2^32 numbers of words, those that round up
    uint4 zeros[2];          // all bits of a word for each bit of the threshold rounded down that is 0
  };
  static constexpr int kBits = 8, kSharedBits = 2;
  uint32_t shared, high, low;

  __device__ __forceinline__ Dropout(const Parameters& p, Shared& shared) {
    const uint2* state = reinterpret_cast<const uint2*>(p.dropout_state);
    const int threshold = int(p.keep * 65536), lane = threadIdx.x % 32;
    if (lane == 0) shared.key = state[0], shared.share = uint32_t(threshold) << 24;
    if (lane < 8) reinterpret_cast<uint32_t*>(shared.zeros)[lane] = (threshold >> (8 + lane) & 1) - 1;
    __syncwarp();
    this->shared = cute::cast_smem_ptr_to_uint(&shared);
    high = state[1].y, low = state[1].x;
  }

  __device__ __forceinline__ uint4 read(int offset) const {
    uint4 four;  // volatile, or it is kept
    asm volatile("ld.volatile.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "r"(shared + offset));
    return four;
  }

  __device__ __forceinline__ static uint32_t draw(uint64_t& state) {
    state = state * 0xf9b25d65u + 1;
    asm("" : "+l"(state));  // else the compiler takes several steps at once, of more instructions
    return uint32_t(state >> 32);
  }

  // The words of a patch of a head; heads are counted through all batches.
  __device__ __forceinline__ void make(uint32_t (&words)[8], uint32_t head, uint32_t row, uint32_t column) const {
    const uint4 own = read(0);
    uint32_t x[4] = {row, column, head ^ high, low}, first_key = own.x, second_key = own.y;
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      const uint64_t first = uint64_t(x[0]) * 0xd2511f53u, second = uint64_t(x[2]) * 0xcd9e8d57u;
      x[0] = uint32_t(second >> 32) ^ x[1] ^ first_key;
      x[2] = uint32_t(first >> 32) ^ x[3] ^ second_key;
      x[1] = uint32_t(second), x[3] = uint32_t(first);
      first_key += 0x9e3779b9u, second_key += 0xbb67ae85u;
    }
    const uint4 low_zeros = read(16), high_zeros = read(32);
    const uint32_t zeros[kBits] = {low_zeros.x, low_zeros.y, low_zeros.z, low_zeros.w,
                                   high_zeros.x, high_zeros.y, high_zeros.z, high_zeros.w};
    uint64_t states[2];
    uint32_t dropped[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      states[i] = uint64_t(x[2 * i + 1]) << 32 | x[2 * i];
      dropped[i] = draw(states[i]) < own.z ? 0 : ~0u;  // of numbers as the threshold is
    }
    const auto compare = [&](uint32_t& word, int i, int bit) {
      const uint32_t drawn = draw(states[i]);
      word = (drawn & word) | (zeros[bit] & (drawn | word));  // 1 is above 0
    };
    CUTE_UNROLL
    for (int at = 0; at < 2 * kSharedBits; ++at) compare(dropped[at % 2], at % 2, at / 2);
    CUTE_UNROLL
    for (int word = 0; word < 4; ++word) {
      words[word] = dropped[0], words[4 + word] = dropped[1];
      CUTE_UNROLL
      for (int at = 2 * kSharedBits; at < 2 * kBits; ++at) compare(words[4 * (at % 2) + word], at % 2, at / 2);
    }
  }
};

// Warps of the producer's warpgroup that make words, as far ahead as there are stages.
constexpr int kMakers = {{ makers }}, kFirstMaker = 4 - kMakers, kWordStages = 2;

// Makes a maker's share of the patches of a tile, with a turn's number; `place` gives a patch's row and column.
template <int kCount, class Place>
__device__ __forceinline__ void make_words(uint4 (&words)[kCount][2], const Dropout& dropout, uint32_t head,
                                           int& turn, Place&& place) {
  CUTE_NO_UNROLL
  for (int i = turn * 32 + threadIdx.x % 32; i < kCount; i += kMakers * 32) {
    const uint2 at = place(i);
    uint32_t made[8];
    dropout.make(made, head, at.x, at.y);
    words[i][0] = make_uint4(made[0], made[1], made[2], made[3]);
    words[i][1] = make_uint4(made[4], made[5], made[6], made[7]);
  }
  // Who begins changes from tile to tile: there may be less to do than there are makers.
  turn = turn == 0 ? kMakers - 1 : turn - 1;
}
