// Adds beta * C. C may be D itself: a thread reads its elements before any thread stores to them.
template <class Element> struct Residual {
  const Element* c;
  int64_t pitch;
  float beta;
  struct Operand {
    Columns<Element> row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    // A row that does not exist, and any row when beta is 0, has no columns.
    const int n0 = at.row[0] < m && beta != 0.f ? n : 0, n1 = at.row[1] < m && beta != 0.f ? n : 0;
    return {Columns<Element>(c + at.row[0] * pitch, at.column, n0),
            Columns<Element>(c + at.row[1] * pitch, at.column, n1)};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      x[i / 2][i % 2] = fmaf(beta, operand.row[i / 2][i % 2], x[i / 2][i % 2]);
  }
};
