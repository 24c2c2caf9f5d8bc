// What kernels that cast fp32 tiles need of CUDA, made up.
#include <cmath>
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
struct alignas(8) uint2 { uint32_t x, y; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t places) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}
template <class To, class From> static To bits_of(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
static float __int_as_float(int32_t bits) { return bits_of<float>(bits); }
static float __uint_as_float(uint32_t bits) { return bits_of<float>(bits); }
static int32_t __float_as_int(float value) { return bits_of<int32_t>(value); }
static uint32_t __float_as_uint(float value) { return bits_of<uint32_t>(value); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.f / a; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static void wait_for_previous_grid() {}
static float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }

// The code of the nearest number with so many bits of mantissa, the largest where that is beyond.
static uint8_t code(float value, int mantissa, int least, float largest) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const float magnitude = min(std::fabs(value), largest);
  const int exponent = magnitude < std::ldexp(1.f, least) ? least : std::ilogb(magnitude);
  const int steps = int(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
  return sign | uint8_t(((exponent - least) << mantissa) + steps);
}
static uint8_t code(float value) {
  switch (kType) {
    case 0: return code(value, 3, -6, 448.f);
    case 1: return code(value, 2, -14, 57344.f);
    default: return std::isnan(value) ? 0 : uint8_t(int8_t(max(-128.f, min(127.f, std::nearbyint(value)))));
  }
}
static uint32_t packed(float a, float b, float c, float d) {
  return code(a) | code(b) << 8 | code(c) << 16 | uint32_t(code(d)) << 24;
}

static int lanes[256];
static void __threadfence() {}
template <class Value> static Value from_lane(Value value, int lane) {
  const int first = threadIdx.x / 32 * 32;
  lanes[threadIdx.x] = bits_of<int>(value);
  __syncwarp();
  const Value found = bits_of<Value>(lanes[first + lane]);
  __syncwarp();
  return found;
}
static int __shfl_up_sync(uint32_t, int value, int apart) {
  const int lane = threadIdx.x % 32;
  return from_lane(value, lane < apart ? lane : lane - apart);
}
static float __shfl_xor_sync(uint32_t, float value, int apart) { return from_lane(value, threadIdx.x % 32 ^ apart); }
static int __reduce_max_sync(uint32_t, int value) {
  for (int apart = 16; apart > 0; apart /= 2) value = max(value, from_lane(value, threadIdx.x % 32 ^ apart));
  return value;
}
static int atomicMax(int* at, int value) {
  const int before = *at;
  *at = max(before, value);
  return before;
}
static unsigned atomicInc(unsigned* at, unsigned last) {
  const unsigned before = *at;
  *at = before >= last ? 0 : before + 1;
  return before;
}
static unsigned atomicExch(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = value;
  return before;
}
static void __stcg(float* to, float value) { *to = value; }
static float __ldcg(const float* from) { return *from; }
alignas(1024) static uint8_t shared_memory[1 << 18];
