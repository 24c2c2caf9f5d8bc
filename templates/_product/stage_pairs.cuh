  // Two neighbouring elements of a row at a time.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int offset = swizzled(row + i * 8, (f * 8 + lane % 4 * 2) * sizeof(ElementD));
        *reinterpret_cast<Pair*>(buffer + offset) = converted(x[f][i]);
      }
    }
  }
