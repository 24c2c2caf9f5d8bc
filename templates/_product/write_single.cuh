// Stores a fragment's two columns of a row one by one, none past the last column.
template <class Element>
__device__ __forceinline__ void write(Element* row, const int (&column)[2], int n, const float (&x)[2]) {
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j)
    if (column[j] < n) row[column[j]] = Element(x[j]);
}
