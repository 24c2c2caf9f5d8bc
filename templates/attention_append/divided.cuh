  const float inverse = 1.f / scale;
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) {
    one[i] = __fmul_rn(one[i], inverse);
    other[i] = __fmul_rn(other[i], inverse);
  }
