// Which row of D a row of the result is written to: index[row], unless D has no such row. Indices below 0 are
// those of rows that are written nowhere.
template <class Index> struct Scatter {
  const Index* index;
  int rows;  // of D

  // The row of D, or -1.
  __device__ __forceinline__ int operator()(int row) const {
    const Index found = index[row];
    return found >= 0 && found < rows ? int(found) : -1;
  }
};
