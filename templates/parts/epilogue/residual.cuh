// Adds beta * C. C may be D itself: a thread reads its elements before any thread stores to them.
template <class Element> struct Residual {
  const Element* c;
  int64_t pitch;
  float beta;
  struct Operand {
    Pair<Element> row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    Operand operand;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)  // with beta = 0 no column counts as existing
      operand.row[i] = at.row[i] < m ? read(c + at.row[i] * pitch, at.column, beta == 0.f ? 0 : n) : Pair<Element>{};
    return operand;
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      x[i / 2][i % 2] = fmaf(beta, float(operand.row[i / 2].value[i % 2]), x[i / 2][i % 2]);
  }
};
