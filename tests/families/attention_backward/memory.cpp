// What the emitted text does with shared memory, on the CPU: TMA's boxes, and wgmma's operands by descriptor.
#include <cstdio>
#include <cstdlib>

static int at_swizzled(int address, int span) {
  return address ^ ((address >> 7 & (span / 16 - 1)) << 4);
}
static int16_t& element(int address) { return *reinterpret_cast<int16_t*>(memory + address); }

// ---- wgmma ---------------------------------------------------------------------------------------
// Element (i, k) of an operand: its rows of 64 or n, and 16 of k.
static int operand(uint64_t descriptor, bool k_major, int i, int k) {
  const int start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const int stride = (descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 62;
  const int span = layout == 1 ? 128 : layout == 2 ? 64 : 32;
  const int offset = k_major ? i / 8 * stride + i % 8 * span + k * 2
                             : i / (span / 2) * leading + k / 8 * stride + k % 8 * span + i % (span / 2) * 2;
  return element(at_swizzled(start + offset, span));
}
template <int n, bool a_k_major, bool b_k_major> static void multiply(uint64_t a, uint64_t b, float* d, bool add) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < n / 2; ++j) {
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + j / 2 % 2 * 8, column = j / 4 * 8 + lane % 4 * 2 + j % 2;
    if (!add) d[j] = 0;
    for (int k = 0; k < 16; ++k) d[j] += operand(a, a_k_major, row, k) * operand(b, b_k_major, column, k);
  }
}

// ---- TMA -----------------------------------------------------------------------------------------
using Matrix = std::vector<std::vector<int>>;
static Matrix random_matrix(int rows, int columns) {
  Matrix made(rows, std::vector<int>(columns));
  for (auto& row : made)
    for (int& x : row) x = rand() % 15 - 7;
  return made;
}
static void load(const uint8_t* tile, const Matrix& from, int row, int column, int rows, int columns) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c)
      element(at_swizzled(int(tile - memory) + c / kBoxColumns * rows * kSpan + r * kSpan + c % kBoxColumns * 2, kSpan)) =
          from[row + r][column + c];
}
#define EXPECT(found, wanted, ...)                                                    \
  if (int(found) != int(wanted)) {                                                    \
    std::printf("line %d: %d, not %d, at ", __LINE__, int(found), int(wanted));       \
    std::printf(__VA_ARGS__);                                                         \
    std::printf("\n");                                                                \
    std::exit(1);                                                                     \
  }
