struct Corner { int row, batch; };  // of a box: two of the coordinates of a tensor map

__device__ __forceinline__ void load_box(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint, uint8_t* box, int column,
                                         Corner corner, int head) {
  cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, box, column, corner.row, head, corner.batch);
}

// Every sequence has p.seq_q rows and p.seq_k columns, and a batch of the tensor maps to itself.
struct Sequence {
  int batch;

  __device__ __forceinline__ int rows(const Parameters& p) const { return p.seq_q; }
  __device__ __forceinline__ int columns(const Parameters& p) const { return p.seq_k; }
  __device__ __forceinline__ int diagonal(const Parameters&) const { return 0; }  // bounds are relative to it already

  // Where TMA finds the kRows rows of q that begin with `row`, or those of k and v.
  template <int kRows> __device__ __forceinline__ Corner rows_at(int row) const { return {row, batch}; }
  template <int kRows> __device__ __forceinline__ Corner columns_at(int column) const { return {column, batch}; }

  __device__ __forceinline__ int64_t o_at(const Parameters& p, int head, int row) const {
    return batch * p.o_batch_stride + head * p.o_head_stride + row * p.o_row_stride;
  }
  __device__ __forceinline__ int64_t lse_at(const Parameters& p, int head, int row) const {
    return (int64_t(batch) * p.heads + head) * p.seq_q + row;
  }
};

struct Place {
  Sequence sequence;
  int head, row;
};

// Tile `tile` of p.q_tiles, the longest first, of a head counted through all batches.
__device__ __forceinline__ Place place(const Parameters& p, int tile, int all_head) {
  const int batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (kBoundsRight ? p.q_tiles - 1 - tile : tile) * kQTile };
}
