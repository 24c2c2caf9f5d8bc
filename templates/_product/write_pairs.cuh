// Stores a fragment's two columns of a row as one word, none past the last column: n is even here and rows
// start at even elements.
template <class Element>
__device__ __forceinline__ void write(Element* row, const int (&column)[2], int n, const float (&x)[2]) {
  struct alignas(2 * sizeof(Element)) Word {
    Element value[2];
  };
  if (column[0] < n) *reinterpret_cast<Word*>(row + column[0]) = {Element(x[0]), Element(x[1])};
}
