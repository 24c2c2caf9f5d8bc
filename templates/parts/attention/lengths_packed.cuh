struct Corner { int row, first; };  // of a box: two of the coordinates of a tensor map

// Sequences lie one after the other, from cu_seqlens[b] to cu_seqlens[b + 1]. A box that reaches past its
// sequence would read or write the next: so the maps are of [dim, row, head, first, back], row and first of
// one pitch, and row has an extent of kRows, the box's. A box from row kRows - count on has `count` rows
// inside, the rest are zeros or not stored; `first` moves it to its place. That may be up to kRows to the
// left: coordinates are not negative, but addresses wrap at 2^64, so that kBack steps of 2^34 - pitch are
// kBack steps of the pitch back. Extents are no larger than this needs, and a box without rows is at the
// tensor's start: TMA may touch what a box names outside of its bounds, though it delivers zeros.
constexpr int kBack = 1 << 30;

__device__ __forceinline__ void load_box(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint, uint8_t* box, int column,
                                         Corner corner, int head) {
  cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, box, column, corner.row, head, corner.first, kBack);
}

struct Sequence {
  int first_row, row_count, first_column, column_count;

  __device__ __forceinline__ int rows(const Parameters&) const { return row_count; }
  __device__ __forceinline__ int columns(const Parameters&) const { return column_count; }
  __device__ __forceinline__ int diagonal(const Parameters& p) const { return bottom_right(p) ? column_count - row_count : 0; }

  template <int kRows> __device__ __forceinline__ static Corner box(int row, int first, int end) {
    const int count = max(0, min(kRows, end - row));
    return {kRows - count, kBack - kRows + (count == 0 ? 0 : first + row + count)};
  }
  template <int kRows> __device__ __forceinline__ Corner rows_at(int row) const { return box<kRows>(row, first_row, row_count); }
  template <int kRows> __device__ __forceinline__ Corner columns_at(int column) const { return box<kRows>(column, first_column, column_count); }

  __device__ __forceinline__ int64_t o_at(const Parameters& p, int head, int row) const {
    return head * p.o_head_stride + (first_row + row) * p.o_row_stride;
  }
  __device__ __forceinline__ int64_t lse_at(const Parameters& p, int head, int row) const {
    return int64_t(head) * p.total_q + first_row + row;
  }
};

struct Place {
  Sequence sequence;
  int head, row;
};

// Sequence b has the tiles from cu_seqlens_q[b] / kQTile + b on: as many as it needs, or one more, whose row
// is not in the sequence. So nobody has to count the tiles of the sequences before.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int head) {
  int sequence = 0;
  for (int end = p.batch; end - sequence > 1;) {
    const int middle = (sequence + end) / 2;
    (p.cu_seqlens_q[middle] / kQTile + middle <= tile ? sequence : end) = middle;
  }
  const int first_row = p.cu_seqlens_q[sequence], rows = p.cu_seqlens_q[sequence + 1] - first_row;
  const int first_column = p.cu_seqlens_k[sequence], columns = p.cu_seqlens_k[sequence + 1] - first_column;
  tile -= first_row / kQTile + sequence;
  return { {first_row, rows, first_column, columns}, head, (kBoundsRight ? (rows + kQTile - 1) / kQTile - 1 - tile : tile) * kQTile };
}
