// Two values of a row as D holds them.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};
__device__ __forceinline__ Pair converted(const Value (&x)[2]) { return { {x[0], x[1]} }; }
