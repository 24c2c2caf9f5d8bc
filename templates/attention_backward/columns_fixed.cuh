// Where a row of k or v begins in a tensor of these strides.
__device__ __forceinline__ int64_t column_at(const Sequence& sequence, int64_t batch_stride,
                                             int64_t head_stride, int64_t column_stride, int head, int column) {
  return sequence.batch * batch_stride + head * head_stride + column * column_stride;
}
