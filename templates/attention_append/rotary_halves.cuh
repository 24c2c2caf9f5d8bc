  Some<Angle, kValues> some_cos, some_sin;
  some_cos.load(to_cos + part * kValues);
  some_sin.load(to_sin + part * kValues);
  some_cos.read(cos);
  some_sin.read(sin);
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) turn(one[i], other[i], cos[i], sin[i]);
