// Reads a fragment's two columns of a row, one by one; 0 past the last column.
template <class Element>
__device__ __forceinline__ Pair<Element> read(const Element* row, const int (&column)[2], int n) {
  return {column[0] < n ? row[column[0]] : Element(0), column[1] < n ? row[column[1]] : Element(0)};
}
