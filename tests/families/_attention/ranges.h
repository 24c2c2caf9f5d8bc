// What the programs of both passes' ranges share; Corner and kBack are of the emitted text before it.
#include <climits>
#include <cstdio>
#include <cstdlib>

static int random_below(int end) { return int(unsigned(rand()) % unsigned(end)); }

#define REQUIRE(condition, ...)                            \
  if (!(condition)) {                                      \
    std::printf("line %d: %s: ", __LINE__, #condition);    \
    std::printf(__VA_ARGS__);                              \
    std::printf("\n");                                     \
    return 1;                                              \
  }

#ifdef PACKED
// What cu_seqlens should not hold, and what they may.
static int wild_offset(int total) {
  switch (random_below(8)) {
    case 0: return -1 - random_below(400);
    case 1: return total + 1 + random_below(400);
    case 2: return INT_MIN;
    case 3: return INT_MAX;
    default: return random_below(total + 1);
  }
}

// The rows of the tensor that a box reaches are the tensor's.
template <int kRows> static int verify_inside(Corner corner, int total) {
  for (int j = 0; j < kRows; ++j) {
    const int at = corner.row + j + (corner.first - kBack);
    REQUIRE(corner.row >= 0 && (corner.row + j >= kRows || (at >= 0 && at < total)), "row %d of %d is read", at, total);
  }
  return 0;
}
#endif
