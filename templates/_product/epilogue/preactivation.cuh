// Stores what passes here to z, which has D's rows and columns.
template <class Element> struct Preactivation {
  Element* z;
  int64_t pitch;

  __device__ __forceinline__ void apply(const float (&x)[2][2], const Coordinates& at, int m, int n) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int row = at.row[i];
      asm volatile("" : "+r"(row));  // else addresses are kept for the next 64 rows, and spill
      if (row < m) write(z + row * pitch, at.column, n, x[i]);
    }
  }
};
