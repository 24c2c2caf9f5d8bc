// The same of rows of v and do, whose head dimension is kDimV: boxes of kValueSpan bytes a row.
template <int kRows> struct ValueTile {
  static constexpr int kBoxBytes = kRows * kValueSpan, kBytes = kValueBoxes * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                              uint8_t* tile, Corner corner, int head) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int box = 0; box < kValueBoxes; ++box)
      load_box(map, full, hint, tile + box * kBoxBytes, box * kValueBoxColumns, corner, head);
  }

  __device__ __forceinline__ static constexpr int columns(int step) {
    return (step * 32 / kValueSpan * kBoxBytes + step * 32 % kValueSpan) / 16;
  }
};
