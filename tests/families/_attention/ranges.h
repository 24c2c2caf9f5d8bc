// What the programs of both passes' ranges share; BoxCoord and kBack are of the emitted text before it.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static int random_below(int end) { return int(unsigned(rand()) % unsigned(end)); }

#define REQUIRE(condition, ...)                            \
  if (!(condition)) {                                      \
    std::printf("line %d: %s: ", __LINE__, #condition);    \
    std::printf(__VA_ARGS__);                              \
    std::printf("\n");                                     \
    return 1;                                              \
  }

// Counts that a row attends to columns side by side: most of what the programs do, so optimised.
template <int kColumns> __attribute__((optimize("O3"))) static void count(unsigned char* times) {
  for (int c = 0; c < kColumns; ++c) ++times[c];
}

// Each row has attended once to what its bounds, and a mask of keys, leave of the columns, and never to the others.
static int verify_times(const std::vector<unsigned char>& times, int rows, int columns, int left, int right,
                        const unsigned char* shown = nullptr) {
  std::vector<unsigned char> wanted(columns);
  for (int r = 0; r < rows; ++r) {
    const int begin = std::max(0, std::min(columns, r - left)), end = std::max(begin, std::min(columns - 1, r + right) + 1);
    std::memset(wanted.data(), 0, columns), std::memset(wanted.data() + begin, 1, end - begin);
    for (int c = 0; shown && c < columns; ++c) wanted[c] &= shown[c] != 0;
    const unsigned char* found = times.data() + size_t(r) * columns;
    if (std::memcmp(found, wanted.data(), columns) == 0) continue;
    for (int c = 0; c < columns; ++c)
      REQUIRE(found[c] == wanted[c], "%d x %d, left %d, right %d: row %d, column %d: %d", rows, columns, left, right, r, c, found[c]);
  }
  return 0;
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
template <int kRows> static int verify_inside(BoxCoord coord, int total) {
  for (int j = 0; j < kRows; ++j) {
    const int at = coord.row + j + (coord.first - kBack);
    REQUIRE(coord.row >= 0 && (coord.row + j >= kRows || (at >= 0 && at < total)), "row %d of %d is read", at, total);
  }
  return 0;
}
#endif
