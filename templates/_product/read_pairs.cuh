// A fragment's two columns of a row of C or of a vector, loaded as one word; 0 past the last column. n is even
// here, and rows start at even elements. The word is split where it is used: split at the load, each load
// would be waited for before the next is issued.
template <class Element> struct Columns {
  using Word = cute::conditional_t<sizeof(Element) == 2, uint32_t, uint64_t>;
  Word word;

  Columns() = default;
  __device__ __forceinline__ Columns(const Element* row, const int (&column)[2], int n)
      : word(column[0] < n ? *reinterpret_cast<const Word*>(row + column[0]) : 0) {}

  __device__ __forceinline__ float operator[](int j) const {
    const Word bits = word >> (j * 8 * sizeof(Element));
    return float(reinterpret_cast<const Element&>(bits));
  }
};
