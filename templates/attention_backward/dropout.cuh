// ---- Makers of words: ahead of the consumers, for every q tile that the block walks ----------------------
{% set heads = "p.all_kv_heads * p.sharing" if operation.lengths == "packed" else "p.heads" %}
__device__ __forceinline__ void make(const Parameters& p, SharedStorage& shared, const Work& work) {
  constexpr int kPatches = kQRows / 16;
  const Dropout dropout(p, shared.dropout[threadIdx.x / 32 - kFirstMaker]);
  const int row = threadIdx.x % 8, column = work.column / 16 + threadIdx.x % 32 / 8;
  Ring<kWordStages> at{0, 1};
  CUTE_NO_UNROLL
  for (int i = rank(); i < p.sharing; i += kCluster) {
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
      make_words(shared.words[at.stage], dropout, head, [&](int i) {
        const int consumer = i / kPatches, box = kKvRows == kKvTile ? consumer : work.part;
        const int first = m * kQTile + (kQRows == kQTile ? 0 : consumer * kQRows) + i % kPatches * 16;
        return make_uint2(first / 2 + row, column + box * (kWgmmaM / 16));
      });
      release(shared.words_full[at.stage]);
      at.advance();
    }
  }
}

// A weight with the sign bit of a word: those that are dropped become negative, and 0 where 16-bit pairs are packed.
__device__ __forceinline__ float mark(float weight, uint32_t word) {
  return __uint_as_float(__float_as_uint(weight) | (word & 0x80000000u));
}

__device__ __forceinline__ uint32_t kept_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.relu.{{ packed_type }}.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
