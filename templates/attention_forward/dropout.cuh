// ---- Makers of words: ahead of the consumers, for every kv tile that the block walks ---------------------
{% set heads = "p.all_heads" if operation.lengths == "packed" else "p.heads" %}
__device__ __forceinline__ void make(const Parameters& p, SharedStorage& shared) {
  constexpr int kPatches = kKvTile / 16;
  const Dropout dropout(p, shared.dropout[threadIdx.x / 32 - kFirstMaker]);
  Ring<kWordStages> at{0, 1};
  int turn = threadIdx.x / 32 - kFirstMaker;
  for (Ring<kQStages> q{0, 0};; q.advance()) {
    shared.q_full[q.stage][0].wait(q.phase);
    const Work& work = shared.work[q.stage][0];
    const int more = work.more, begin = work.begin, end = work.end{{ " + work.skipped" if skips }};
    const uint32_t head = work.sequence.{{ "number" if operation.lengths == "packed" else "batch" }} * {{ heads }} + work.head, rows = work.row / 16;
{% if operation.blocks %}
    const int* const listed = p.listed + int64_t(work.list) * p.list_tiles;
{% endif %}
    release(shared.q_empty[q.stage][0]);
    if (!more) return;
    CUTE_NO_UNROLL
    for (int n = end - 1; n >= begin; --n) {
{% if operation.blocks %}
      const int tile = listed[end - 1 - n];
{% endif %}
      shared.words_empty[at.stage].wait(at.phase);
      make_words(shared.words[at.stage], dropout, head, turn, [&](int i) {
        return make_uint2(rows + i / kPatches, {{ "tile" if operation.blocks else "n" }} * kPatches + i % kPatches);
      });
      release(shared.words_full[at.stage]);
      at.advance();
    }
  }
}

// Of 16 columns after the other, of which a thread has 8 weights by the sign bits of bytes, and the bits below.
using Words = uint32_t[kKvTile / 16];

// Masks of pairs of weights side by side that are dropped, by the sign bits of two bytes of a word.
__device__ __forceinline__ void expand(Weights& dropped, const Words& words) {
  CUTE_UNROLL
  for (int i = 0; i < kKvTile / 4; ++i)  // not by __byte_perm(), which knows no signs
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(dropped[i / 4][i % 4]) : "r"(words[i / 4] << i % 4 / 2), "r"(i % 2 ? 0xbbaa : 0x9988));
}
// Weights, with 0 for those that are dropped.
__device__ __forceinline__ void keep(Weights& weights, const Weights& packed, const Weights& dropped) {
  CUTE_UNROLL
  for (int i = 0; i < kKvTile / 4; ++i) weights[i / 4][i % 4] = packed[i / 4][i % 4] & ~dropped[i / 4][i % 4];
}
{% if takes_early %}
__device__ __forceinline__ void fence(Weights& weights) {
  for (auto& four : weights) for (uint32_t& pair : four) asm volatile("" : "+r"(pair)::"memory");
}
{% endif %}
