// A stage of v, whose rows are of 16 bits: boxes of the head dimension side by side, kValueSpan bytes a row.
struct Values {
  static constexpr int kColumns = kValueSpan / 2, kBoxBytes = kKvTile * kValueSpan, kBytes = {{ value_dim }} / kColumns * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              const Sequence& sequence, int key, int head) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int i = 0; i < {{ value_dim }} / kColumns; ++i)
      load_box(map, full, kEvictLast, tile + i * kBoxBytes, i * kColumns, sequence.columns_at<kKvTile>(key), head);
  }
  __device__ __forceinline__ static uint64_t descriptor(const uint8_t* tile) {
    return matrix(tile, kBoxBytes, 8 * kValueSpan, {{ layout.v_layout_type }});
  }

  // From the tile's start to where the 16 keys `step` begin, in a descriptor.
  __device__ __forceinline__ static constexpr int keys(int step) { return step * kValueSpan; }
};
