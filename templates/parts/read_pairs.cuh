// Reads a fragment's two columns of a row that starts at an even address; 0 past the last column.
template <class Element>
__device__ __forceinline__ Pair<Element> read(const Element* row, const int (&column)[2], int n) {
  if (column[1] < n) return *reinterpret_cast<const Pair<Element>*>(row + column[0]);
  return {column[0] < n ? row[column[0]] : Element(0), Element(0)};
}
