// ---- Dropout: which weights are dropped --------------------------------------------------------------
// A function of state, batch, head, row and column alone, so that every tile of either pass finds the same.
// A word is of 32 weights: of rows 16 i + j and 8 below, by columns from 16 l to 16 l + 15. That of row 8 h and column
// 8 a + 2 b + c there has bit 16 h + 8 c + 7 - a - 2 b: 1 where the weight is dropped. A thread of the forward pass has
// two columns and the two 8 further on, one of the backward pass one column and the one 8 further on of two words.
//
// A weight is dropped where its number, of 8 random bits, is at least the threshold: 2^8 keep, rounded down or up for
// all of a word as one more number of the word says, so that each is kept with probability keep to 2^-16. Two weights
// of a word thereby correlate by at most 2^-18 over keep (1 - keep); those of two words do not. Random words are of one
// bit of the numbers of all 32, which are compared at once, from the lowest bit on. Philox4x32 makes four of them
// (Salmon et al., 2011), in 7 rounds, the fewest that pass BigCrush. The number of a word is a sum of both of the lowest,
// the one times an odd number: of 24 bits more than any one weight decides.
struct Dropout {
  // Of the state and of the threshold, in shared memory: a thread has no registers to keep what all have.
  struct alignas(16) Shared {
    uint2 key;
    uint32_t share, unused;  // of 2^32 numbers of words, those that round up
    uint4 zeros[2];          // all bits of a word for each bit of the threshold rounded down that is 0
  };
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

  // Words of a head, counted through all batches: each of rows 16 (rows / 8) + rows % 8 and 8 below.
  template <int kCount>
  __device__ __forceinline__ void make(uint32_t (&words)[kCount], uint32_t head, const uint32_t (&rows)[kCount],
                                       const uint32_t (&columns)[kCount]) const {
    const uint4 own = read(0);
    uint32_t x[kCount * 2][4], first_key = own.x, second_key = own.y;
    CUTE_UNROLL
    for (int i = 0; i < kCount * 2; ++i)
      x[i][0] = rows[i / 2] * 2 + i % 2, x[i][1] = columns[i / 2], x[i][2] = head ^ high, x[i][3] = low;
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      CUTE_UNROLL
      for (int i = 0; i < kCount * 2; ++i) {
        const uint64_t first = uint64_t(x[i][0]) * 0xd2511f53u, second = uint64_t(x[i][2]) * 0xcd9e8d57u;
        x[i][0] = uint32_t(second >> 32) ^ x[i][1] ^ first_key;
        x[i][2] = uint32_t(first >> 32) ^ x[i][3] ^ second_key;
        x[i][1] = uint32_t(second), x[i][3] = uint32_t(first);
      }
      first_key += 0x9e3779b9u, second_key += 0xbb67ae85u;
    }
    const uint4 low_zeros = read(16), high_zeros = read(32);
    const uint32_t zeros[8] = {low_zeros.x, low_zeros.y, low_zeros.z, low_zeros.w,
                               high_zeros.x, high_zeros.y, high_zeros.z, high_zeros.w};
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      words[i] = x[2 * i][0] * 0x9e3779b1u + x[2 * i][1] < own.z ? 0 : ~0u;  // of numbers as the threshold is
      CUTE_UNROLL
      for (int bit = 0; bit < 8; ++bit) {
        const uint32_t one = x[2 * i + bit / 4][bit % 4];
        words[i] = (one & words[i]) | (zeros[bit] & (one | words[i]));  // 1 is above 0
      }
    }
  }
};

// Warps of the producer's warpgroup that make words, as far ahead as there are stages.
constexpr int kMost = {{ words_together }};  // words of a thread at a time, which do not wait for each other
constexpr int kMakers = {{ makers }}, kFirstMaker = 4 - kMakers, kWordStages = 2;

// Makes a maker's share of kCount times 32 words; `place` gives the rows and the columns of a lane's i-th.
template <int kCount, class Place>
__device__ __forceinline__ void make_words(uint32_t (&words)[kCount][32], const Dropout& dropout, uint32_t head,
                                           Place&& place) {
  constexpr int kShare = (kCount + kMakers - 1) / kMakers, kTurns = (kShare + kMost - 1) / kMost;
  constexpr int kTogether = (kShare + kTurns - 1) / kTurns;
  CUTE_NO_UNROLL
  for (int first = threadIdx.x / 32 - kFirstMaker; first < kCount; first += kMakers * kTogether) {
    uint32_t found[kTogether], rows[kTogether], columns[kTogether];
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const uint2 at = place(first + i * kMakers);
      rows[i] = at.x, columns[i] = at.y;
    }
    dropout.make(found, head, rows, columns);
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) asm volatile("" : "+r"(found[i]));  // made together, whichever are stored
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i)
      if (first + i * kMakers < kCount) words[first + i * kMakers][threadIdx.x % 32] = found[i];
  }
}
