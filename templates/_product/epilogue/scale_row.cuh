// Multiplies each row of D by its entry of a vector.
struct ScaleRow {
  const float* scale;
  struct Operand {
    float row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int) const {
    return {at.row[0] < m ? scale[at.row[0]] : 0.f, at.row[1] < m ? scale[at.row[1]] : 0.f};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= operand.row[i / 2];
  }
};
