// What kernels that dequantize need of CUDA, made up, in addition to cast/emulated.h.
#define CUTE_NO_UNROLL
struct alignas(8) float2 { float x, y; };
template <class Value> static Value __ldcs(const Value* from) { return *from; }
static void store_eight(uint16_t* to, uint4 values) { *reinterpret_cast<uint4*>(to) = values; }
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) >> by);
}

// The bits of the nearest number of 16 bits, of which so many are of mantissa; infinity beyond them.
static uint16_t nearest(double value, int mantissa, int least, uint16_t infinity) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  const int exponent = magnitude < std::ldexp(1., least) ? least : std::ilogb(magnitude);
  const int steps = int(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
  return sign | uint16_t(min(((exponent - least) << mantissa) + steps, int(infinity)));
}
static uint16_t to_bf16(double value) { return nearest(value, 7, -126, 0x7f80); }
static uint16_t to_fp16(double value) { return nearest(value, 10, -14, 0x7c00); }
static float of_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
static float of_fp16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
  const float size = std::ldexp(float(exponent ? mantissa + 1024 : mantissa), max(exponent, 1) - 25);
  return bits & 0x8000 ? -size : size;
}
namespace cutlass {
struct bfloat16_t {
  uint16_t bits;
  operator float() const { return of_bf16(bits); }
};
struct half_t {
  uint16_t bits;
  operator float() const { return of_fp16(bits); }
  static half_t bitcast(uint16_t bits) { return {bits}; }
};
}  // namespace cutlass

static uint32_t rounded_bf16(float low, float high) { return to_bf16(low) | uint32_t(to_bf16(high)) << 16; }
static uint32_t rounded_fp16(float low, float high) { return to_fp16(low) | uint32_t(to_fp16(high)) << 16; }
static uint32_t fp16_of_e4m3(uint32_t bytes, int half) {
  uint32_t found = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t byte = bytes >> (16 * half + 8 * i) & 0xff;
    const uint32_t bits = to_fp16(std::ldexp(__uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20), 120));
    found |= ((byte & 0x7f) == 0x7f ? 0x7fff : bits) << 16 * i;
  }
  return found;
}
static uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t found = 0;
  for (int i = 0; i < 32; i += 16) {
    const double product = double(of_bf16(a >> i & 0xffff)) * of_bf16(b >> i & 0xffff);
    found |= uint32_t(to_bf16(product + of_bf16(c >> i & 0xffff))) << i;
  }
  return found;
}
static uint32_t multiply_bf16(uint32_t a, uint32_t b) { return fma_bf16(a, b, 0x80008000); }  // -0, which adds nothing
static uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = uint32_t(both >> (choice >> 4 * i & 7) * 8 & 0xff);
    const bool sign = choice >> 4 * i & 8;
    found |= (sign ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return found;
}
static uint32_t both(uint32_t pair, int half) { return permute(pair, 0, half ? 0x3232 : 0x1010); }
static uint32_t masked_with(uint32_t a, uint32_t mask, uint32_t more) { return (a & mask) | more; }
