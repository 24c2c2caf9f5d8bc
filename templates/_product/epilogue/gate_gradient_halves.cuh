// Takes the gradient of a gate's result to that of gate and up, which dz gets and z has, n columns of each; the
// result itself passes on.
template <class Function, class Derivative, class Factor, class Element> struct GateGradientHalves {
  const Element* z;
  Element* dz;
  int64_t pitch;
  struct Operand {
    Columns<Element> gate[2], up[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    // A row that does not exist has no columns.
    const int up[2] = {at.column[0] + n, at.column[1] + n};
    int row[2] = {at.row[0], at.row[1]};
    asm volatile("" : "+r"(row[0]), "+r"(row[1]));  // else addresses are kept for all chunks, and spill
    const int n0 = row[0] < m ? n : 0, n1 = row[1] < m ? n : 0;
    const Element *row0 = z + row[0] * pitch, *row1 = z + row[1] * pitch;
    return { {Columns<Element>(row0, at.column, n0), Columns<Element>(row1, at.column, n1)},
            {Columns<Element>(row0, up, 2 * n0), Columns<Element>(row1, up, 2 * n1)} };
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand, const Coordinates& at, int m,
                                        int n) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float of_gate[2], of_up[2];
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float gate = operand.gate[i][j], up = operand.up[i][j];
        const float value = Function::function(gate), factor = Factor::function(up);
        of_gate[j] = x[i][j] * factor * Derivative::slope(gate);
        of_up[j] = x[i][j] * value * Factor::slope(up);
        x[i][j] = value * factor;
      }
      int row = at.row[i];
      asm volatile("" : "+r"(row));  // else addresses are kept for the next 64 rows, and spill
      if (row >= m) continue;
      const int up[2] = {at.column[0] + n, at.column[1] + n};
      write(dz + row * pitch, at.column, n, of_gate);
      write(dz + row * pitch, up, 2 * n, of_up);
    }
  }
};
