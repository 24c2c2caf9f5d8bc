// ---- Dropout: which weights are dropped --------------------------------------------------------------
// A function of state, batch, head, row and column alone, so that every tile of either pass finds the same.
// A patch is 16 rows by 16 columns, in 8 words of 32 weights. That of row 8 h + 2 i + r and column 8 a + 4 g + 2 b + c
// has a bit of word 2 i + g: 16 h + 8 c + 7 - 4 r - 2 b - a, 1 where it is dropped. A thread of the forward pass has
// all h, c and a of a word, one of the backward pass all h, r and a.
// A weight is dropped where its number, of 8 random bits, is at least the threshold: 2^8 keep, rounded down or up as
// one more number says, so that each is kept with probability keep to 2^-16. Random words are of one bit of the
// numbers of 32 weights, which are compared at once, from the lowest bit on.
// Words 0 to 3 share the two lowest bits and the number that rounds, and so do words 4 to 7: these count where the six
// bits above equal the threshold's, once in 2^6. docs/families/attention_forward.md says how much that correlates.
// Philox4x32 (Salmon et al., 2011; in 7 rounds, the fewest that pass BigCrush, with key 0) of the call's state, and again
// of that with the patch's place added bit by bit, seeds numbers of 64 bits, u[n + 3] = u[n] + c low(u[n + 1]), whose upper
// halves are the random words. The lower ones are a recursive generator modulo 2^32, c = 2^32 - 69069 (docs/notebook.md).
struct Dropout {
  // For lack of registers: what Philox makes of the state, and words of the threshold's bits that are 0, rounded down.
  using Shared = uint4[3];
  static constexpr int kBits = 8, kSharedBits = 2;
  uint32_t shared, share;  // the latter of 2^32 numbers of words: those that round up

  __device__ __forceinline__ Dropout(const Parameters& p, Shared& shared) {
    const uint2* given = reinterpret_cast<const uint2*>(p.dropout_state);
    uint32_t state[4] = {given[0].x, given[0].y, given[1].x, given[1].y};
    philox(state);
    const int threshold = int(p.keep * 65536), lane = threadIdx.x % 32;
    if (lane == 0) shared[0] = make_uint4(state[0], state[1], state[2], state[3]);
    if (lane < 8) reinterpret_cast<uint32_t*>(shared + 1)[lane] = (threshold >> (8 + lane) & 1) - 1;
    __syncwarp();
    this->shared = cute::cast_smem_ptr_to_uint(&shared), share = uint32_t(threshold) << 24;
  }
  __device__ __forceinline__ uint4 read(int offset) const {
    uint4 four;  // volatile, or it is kept
    asm volatile("ld.volatile.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "r"(shared + offset));
    return four;
  }
  __device__ __forceinline__ static void philox(uint32_t (&x)[4]) {
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      uint64_t first, second;  // not by *: the compiler would add products of upper halves, which are 0
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(first) : "r"(x[0]), "r"(0xd2511f53));
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(second) : "r"(x[2]), "r"(0xcd9e8d57));
      x[0] = uint32_t(second >> 32) ^ x[1] ^ round * 0x9e3779b9u;
      x[2] = uint32_t(first >> 32) ^ x[3] ^ round * 0xbb67ae85u;
      x[1] = uint32_t(second), x[3] = uint32_t(first);
    }
  }

  // Makes the words of the patch in a row and column of a head; heads are counted through all batches.
  __device__ __forceinline__ void make(uint4 (&words)[2], uint32_t head, uint2 patch) const {
    const uint4 state = read(0);
    uint32_t x[4] = {patch.x ^ state.x, patch.y ^ state.y, head ^ state.z, state.w};
    philox(x);
    const uint4 low_zeros = read(16), high_zeros = read(32);
    const uint32_t zeros[kBits] = {low_zeros.x, low_zeros.y, low_zeros.z, low_zeros.w,
                                   high_zeros.x, high_zeros.y, high_zeros.z, high_zeros.w};
    uint32_t low[3] = {x[0], x[1], x[2]}, high[3] = {x[3], x[3], x[3]};  // of the last three numbers
    const auto draw = [&] {
      const uint64_t sum = uint64_t(low[1]) * (0u - 69069u) + (uint64_t(high[0]) << 32 | low[0]);
      low[0] = low[1], low[1] = low[2], low[2] = uint32_t(sum);
      high[0] = high[1], high[1] = high[2], high[2] = uint32_t(sum >> 32);
      asm("" : "+r"(low[2]), "+r"(high[2]));  // else the compiler takes several steps at once, of more instructions
      return high[2];
    };
    const auto compare = [&](uint32_t& word, int bit) {
      const uint32_t drawn = draw();
      word = (drawn & word) | (zeros[bit] & (drawn | word));  // 1 is above 0
    };
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t of_four = draw() < share ? 0 : ~0u, dropped[4];  // of numbers as the threshold is
      CUTE_UNROLL
      for (int bit = 0; bit < kSharedBits; ++bit) compare(of_four, bit);
      CUTE_UNROLL
      for (int word = 0; word < 4; ++word) {
        dropped[word] = of_four;
        CUTE_UNROLL
        for (int bit = kSharedBits; bit < kBits; ++bit) compare(dropped[word], bit);
      }
      words[i] = make_uint4(dropped[0], dropped[1], dropped[2], dropped[3]);
    }
  }
};

// Warps of the producer's warpgroup that make words, as far ahead as there are stages.
constexpr int kMakers = {{ makers }}, kFirstMaker = 4 - kMakers, kWordStages = {{ layout.word_stages }};

// Makes a maker's share of the patches of a tile, with a turn's number; `place` gives a patch's row and column.
template <int kCount, class Place>
__device__ __forceinline__ void make_words(uint4 (&words)[kCount][2], const Dropout& dropout, uint32_t head,
                                           int& turn, Place&& place) {
  CUTE_NO_UNROLL
  for (int i = turn * 32 + threadIdx.x % 32; i < kCount; i += kMakers * 32) dropout.make(words[i], head, place(i));
  // Who begins changes from tile to tile: there may be less to do than there are makers.
  turn = turn == 0 ? kMakers - 1 : turn - 1;
}
