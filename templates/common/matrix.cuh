// A matrix in shared memory as wgmma is told of it: rows come in groups of 8, `stride` bytes from one
// group to the next, swizzled by `layout`; `leading` bytes from one box of columns to the next. Adding
// to the result moves the start, in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix(const uint8_t* start, int leading, int stride, int layout) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(start) >> 4;
  descriptor.bitfield.leading_byte_offset_ = leading >> 4;
  descriptor.bitfield.stride_byte_offset_ = stride >> 4;
  descriptor.bitfield.layout_type_ = layout;
  return descriptor;
}
