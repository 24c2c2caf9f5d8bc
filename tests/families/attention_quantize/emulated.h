// What a kernel that transposes v needs of CUDA, made up.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cta.h"
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define CUTE_UNROLL
#define OFFSET(type, field) offsetof(type, field)
using std::max, std::min;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t places) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}
namespace cutlass { struct float_e4m3_t { uint8_t bits; }; }
