// ---- Makers of words: ahead of the consumers, for every q tile that the block walks ----------------------
{% set heads = "p.all_kv_heads * p.sharing" if operation.lengths == "packed" else "p.heads" %}
__device__ __forceinline__ void make(const Parameters& p, SharedStorage& shared, const Work& work) {
  constexpr int kPatches = kQRows / 16;
  const Dropout dropout(p, shared.dropout[threadIdx.x / 32 - kFirstMaker]);
  const int column = work.column / 16;
  int turn = threadIdx.x / 32 - kFirstMaker;
  Ring<kWordStages> at{0, 1};
  CUTE_NO_UNROLL
  for (int i = {{ rank }}; i < p.sharing; {{ next_head }}) {
    const uint32_t head = work.sequence.{{ "number" if operation.lengths == "packed" else "batch" }} * ({{ heads }}) + work.head * p.sharing + i;
{% if operation.blocks %}
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n) {
      const int m = list.entries[n].x;
{% else %}
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n) {
      const int m = walk(p, work, n);
{% endif %}
      shared.words_empty[at.stage].wait(at.phase);
      make_words(shared.words[at.stage], dropout, head, turn, [&](int i) {
        const int consumer = i / (kPatches * 4), box = {{ "work.part" if shares_rows else "consumer" }};
        const int first = m * (kQTile / 16){{ " + consumer * kPatches" if shares_rows }};
        return make_uint2(first + i % kPatches, column + box * (kWgmmaM / 16) + i / kPatches % 4);
      });
      release(shared.words_full[at.stage]);
      at.advance();
    }
  }
}

// Of 16 rows after the other, of which a thread has 8 weights.
using Words = uint32_t[kQRows / 16];

// Whether accumulator i is of a weight that is dropped.
__device__ __forceinline__ bool is_dropped(const Words& words, int i) {
  return words[i / 8] >> (i / 4 % 2 * 16 + 5 - i % 2 * 4 - i / 2 % 2) & 1;
}
