struct Corner { int row, first; };  // of a box: two of the coordinates of a tensor map

// Sequences lie one after the other, from cu_seqlens[b] to cu_seqlens[b + 1]. A box that reaches past its sequence
// would read the next: so the maps are of [dim, row, head, first, back], row and first of one pitch, and row has an
// extent of kRows, the box's. A box from row kRows - count on has `count` rows inside, the rest are zeros; `first`
// moves it to its place, up to kRows to the left: coordinates are not negative, but addresses wrap at 2^64, so that
// kBack steps of 2^34 - pitch are kBack steps of the pitch back. Extents are no larger than needed, and a box without
// rows is at the tensor's start: TMA may touch what a box names out of bounds, though it delivers zeros.
constexpr int kBack = 1 << 30;

__device__ __forceinline__ void load_box(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                         uint8_t* box, int column, Corner corner, int head) {
  cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, box, column, corner.row, head,
                               corner.first, kBack);
}

struct Sequence {
  int first_row, row_count, first_column, column_count;
{% if scored or operation.dropout or operation.eight %}
  int number;
{% endif %}

  __device__ __forceinline__ int rows(const Parameters&) const { return row_count; }
  __device__ __forceinline__ int columns(const Parameters&) const { return column_count; }
{% if diagonal %}
  // What bounds are relative to, beside a row.
  __device__ __forceinline__ int diagonal(const Parameters& p) const {
    return p.bottom_right ? column_count - row_count : 0;
  }
{% endif %}

  // Where TMA finds the kRows rows of q that begin with `row`, or those of k and v.
  template <int kRows> __device__ __forceinline__ static Corner box(int row, int first, int end) {
    const int count = max(0, min(kRows, end - row));
    return {kRows - count, kBack - kRows + (count == 0 ? 0 : first + row + count)};
  }
  template <int kRows> __device__ __forceinline__ Corner rows_at(int row) const {
    return box<kRows>(row, first_row, row_count);
  }
  template <int kRows> __device__ __forceinline__ Corner columns_at(int column) const {
    return box<kRows>(column, first_column, column_count);
  }

  // Where a row begins in a tensor of these strides.
  __device__ __forceinline__ int64_t row_at(int64_t, int64_t head_stride, int64_t row_stride, int head, int row) const {
    return head * head_stride + (first_row + row) * row_stride;
  }
  __device__ __forceinline__ int64_t lse_at(const Parameters& p, int head, int row) const {
    return int64_t(head) * p.total_q + first_row + row;
  }
};

struct Place { Sequence sequence; int head, row; };

// Nobody has looked at what offsets hold: each counts as the nearest of [0, total]. A count below 0 is of nothing.
__device__ __forceinline__ int offset(const int* offsets, int b, int total) { return max(0, min(offsets[b], total)); }

// Which of `count` sequences a tile is of, and which of `tiles` are: [begin, end). Unless offsets decrease, b has those
// from offsets[b] / kTile + b on: as many as it needs, or one more without a row. So nobody counts the tiles before.
struct Owner { int sequence, begin, end; };
template <int kTile> __device__ __forceinline__ Owner owner_of(const int* offsets, int count, int tile, int tiles) {
  Owner owner{0, 0, tiles};
  for (int last = count; last - owner.sequence > 1;) {
    const int middle = (owner.sequence + last) / 2, first = offsets[middle] / kTile + middle;
    if (first <= tile) owner = {middle, max(owner.begin, first), owner.end};
    else last = middle, owner.end = min(owner.end, first);
  }
  return owner;
}
