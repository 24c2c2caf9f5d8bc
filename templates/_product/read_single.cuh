// A fragment's two columns of a row of C or of a vector, read one by one; 0 past the last column.
template <class Element> struct Columns {
  Element value[2];

  Columns() = default;
  __device__ __forceinline__ Columns(const Element* row, const int (&column)[2], int n)
      : value{column[0] < n ? row[column[0]] : Element(0), column[1] < n ? row[column[1]] : Element(0)} {}

  __device__ __forceinline__ float operator[](int j) const { return float(value[j]); }
};
