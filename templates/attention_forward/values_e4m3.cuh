// A stage of v, which lies dim-major in memory: boxes of kValueSpan keys side by side, a row for each index of the
// head dimension. Of 16 keys the place 4 t + u has key (u / 2) * 8 + 2 t + u % 2: accumulators of scores are wgmma's A
// as they lie then. Places past the last key are zeros.
struct Values {
  static constexpr int kBoxBytes = kDim * kValueSpan, kBytes = kKvTile / kValueSpan * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              const Sequence& sequence, int key, int head) {
{% if operation.lengths == "packed" %}
    // Each sequence begins at a multiple of {{ keys_of_a_scale }}, so that no tile reaches into the next one.
    key += (sequence.first_column + sequence.number * {{ keys_of_a_scale - 1 }}) / {{ keys_of_a_scale }} * {{ keys_of_a_scale }};
{% endif %}
    const int batch = {{ "0" if operation.lengths == "packed" else "sequence.batch" }};
    CUTE_NO_UNROLL  // the producer has few registers
    for (int i = 0; i < kKvTile / kValueSpan; ++i)
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictLast, tile + i * kBoxBytes,
                                   key + i * kValueSpan, 0, head, batch);
  }
  __device__ __forceinline__ static uint64_t descriptor(const uint8_t* tile) {
    return matrix(tile, 0, 8 * kValueSpan, {{ layout.v_layout_type }});
  }

  // From the tile's start to where the 32 keys `step` begin, in a descriptor.
  __device__ __forceinline__ static constexpr int keys(int step) {
    return (step * 32 / kValueSpan * kBoxBytes + step * 32 % kValueSpan) / 16;
  }
};
