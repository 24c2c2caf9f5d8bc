// Where a row of k or v begins in a tensor of these strides.
__device__ __forceinline__ int64_t column_at(const Sequence& sequence, int64_t, int64_t head_stride,
                                             int64_t column_stride, int head, int column) {
  return head * head_stride + (sequence.first_column + column) * column_stride;
}
