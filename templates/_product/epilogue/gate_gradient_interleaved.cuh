// Takes the gradient of a gate's result to that of gate and up, which dz gets and z has, in turn; the result
// itself passes on.
template <class Function, class Derivative, class Factor, class Element> struct GateGradientInterleaved {
  const Element* z;
  Element* dz;
  int64_t pitch;
  struct Operand {
    Columns<Element> both[2][2];  // of a row and a column of D
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    Operand loaded;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int column = 2 * at.column[i % 2], row = at.row[i / 2];
      asm volatile("" : "+r"(row), "+r"(column));  // else addresses are kept for all chunks, and spill
      loaded.both[i / 2][i % 2] = Columns<Element>(z + row * pitch, {column, column + 1}, row < m ? 2 * n : 0);
    }
    return loaded;
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand, const Coordinates& at, int m,
                                        int n) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float& passing = x[i / 2][i % 2];
      const float gate = operand.both[i / 2][i % 2][0], up = operand.both[i / 2][i % 2][1];
      const float value = Function::function(gate), factor = Factor::function(up);
      const float gradients[2] = {passing * factor * Derivative::slope(gate),
                                  passing * value * Factor::slope(up)};
      passing = value * factor;
      int row = at.row[i / 2], column = 2 * at.column[i % 2];
      asm volatile("" : "+r"(row), "+r"(column));
      if (row < m) write(dz + row * pitch, {column, column + 1}, 2 * n, gradients);
    }
  }
};
