// Adds a vector over the columns of D.
template <class Element> struct Bias {
  const Element* bias;
  using Operand = Columns<Element>;

  __device__ __forceinline__ Operand load(const Coordinates& at, int, int n) const {
    return {bias, at.column, n};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] += operand[i % 2];
  }
};
