  constexpr int kPairs = kValues / 2;
  Some<Angle, kPairs> some_cos[2], some_sin[2];
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int pair = half * (p.rotary / 4) + part * kPairs;
    some_cos[half].load(to_cos + pair);
    some_sin[half].load(to_sin + pair);
  }
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    some_cos[half].read(cos, half * kPairs);
    some_sin[half].read(sin, half * kPairs);
  }
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    turn(one[2 * i], one[2 * i + 1], cos[i], sin[i]);
    turn(other[2 * i], other[2 * i + 1], cos[kPairs + i], sin[kPairs + i]);
  }
