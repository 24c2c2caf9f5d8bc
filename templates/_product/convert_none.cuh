// Two adjacent values of a row: D has their type.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) { return { {x[0], x[1]} }; }
