struct Corner { int row, batch; };  // of a box: two of the coordinates of a tensor map

__device__ __forceinline__ void load_box(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                         uint8_t* box, int column, Corner corner, int head) {
  cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, box, column, corner.row, head,
                               corner.batch);
}

// Every sequence has p.seq_q rows and p.seq_k columns, and a batch of the tensor maps to itself.
struct Sequence {
  int batch;

  __device__ __forceinline__ int rows(const Parameters& p) const { return p.seq_q; }
  __device__ __forceinline__ int columns(const Parameters& p) const { return p.seq_k; }

  // Where TMA finds the kRows rows of q that begin with `row`, or those of k and v.
  template <int kRows> __device__ __forceinline__ Corner rows_at(int row) const { return {row, batch}; }
  template <int kRows> __device__ __forceinline__ Corner columns_at(int column) const { return {column, batch}; }

  // Where a row begins in a tensor of these strides.
  __device__ __forceinline__ int64_t row_at(int64_t batch_stride, int64_t head_stride, int64_t row_stride, int head,
                                            int row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
  __device__ __forceinline__ int64_t lse_at(const Parameters& p, int head, int row) const {
    return (int64_t(batch) * p.heads + head) * p.seq_q + row;
  }
};
{% if places %}

struct Place {
  Sequence sequence;
  int head, row;
};
{% endif %}
