// One register of magnitudes: one value.
using Word = float;
__device__ __forceinline__ float magnitude(float word) { return fabsf(word); }
__device__ __forceinline__ float larger_each(float a, float b) { return larger(a, b); }
constexpr int kWords = kValues * sizeof(X) / sizeof(Word);
__device__ __forceinline__ Word magnitude(const Vector& vector, int i) {
  return magnitude(reinterpret_cast<const Word*>(vector.words)[i]);
}

// Value i of a vector.
__device__ __forceinline__ float value_of(const Vector& vector, int i) {
  return float(vector.values[i]);
}
