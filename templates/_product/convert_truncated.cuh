// Converts two adjacent values of a row to bf16 by their upper halves: they are rounded already.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  const uint32_t bits = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x7632);
  return reinterpret_cast<const Pair&>(bits);
}
