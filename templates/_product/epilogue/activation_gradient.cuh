// Multiplies dy by a function's derivative (_activation/) at what passes here.
template <class Function, class Element> struct ActivationGradient {
  const Element* dy;
  int64_t pitch;
  struct Operand {
    Columns<Element> row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    // A row that does not exist has no columns.
    return {Columns<Element>(dy + at.row[0] * pitch, at.column, at.row[0] < m ? n : 0),
            Columns<Element>(dy + at.row[1] * pitch, at.column, at.row[1] < m ? n : 0)};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = operand.row[i / 2][i % 2] * Function::slope(x[i / 2][i % 2]);
  }
};
