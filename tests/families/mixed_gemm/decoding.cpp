// What a decoding part needs of CUDA, exactly; then the part; then every code in every place.
#include <cmath>
#include <random>
#include <string>
#include <type_traits>
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
using std::max;
// A number of `exponent` bits of exponent and `mantissa` of mantissa, no infinities.
static double number(uint32_t bits, int exponent, int mantissa, int bias) {
  const int e = bits >> mantissa & ((1 << exponent) - 1), m = bits & ((1 << mantissa) - 1);
  const double size = std::ldexp(e ? m + (1 << mantissa) : m, std::max(e, 1) - bias - mantissa);
  return bits >> (exponent + mantissa) & 1 ? -size : size;
}
static double as_double(uint32_t bits) {
  const int most = (1 << kExponent) - 1;
  if ((bits >> kMantissa & most) == most) return INFINITY;  // or NaN: what no part should make
  return number(bits, kExponent, kMantissa, most / 2);
}
static uint32_t rounded(double x) {  // to the nearest, and ties to even
  const int bias = (1 << (kExponent - 1)) - 1, sign = std::signbit(x) ? 1 << 15 : 0;
  x = std::fabs(x);
  const int e = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
  const uint32_t m = std::nearbyint(std::ldexp(x, kMantissa - e));
  return sign | std::min((uint32_t(e + bias - 1) << kMantissa) + m, ((1u << kExponent) - 1) << kMantissa);
}
template <class F> uint32_t pairs(F f) { return f(0) | f(16) << 16; }
static uint32_t product_and_sum(uint32_t a, uint32_t b, uint32_t c) {
  return pairs([=](int i) {
    return rounded(as_double(a >> i & 0xffff) * as_double(b >> i & 0xffff) + as_double(c >> i & 0xffff));
  });
}
static uint32_t product(uint32_t a, uint32_t b) {
  return pairs([=](int i) { return rounded(as_double(a >> i & 0xffff) * as_double(b >> i & 0xffff)); });
}
static uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) { return product_and_sum(a, b, c); }
static uint32_t fma_fp16(uint32_t a, uint32_t b, uint32_t c) { return product_and_sum(a, b, c); }
static uint32_t multiply_bf16(uint32_t a, uint32_t b) { return product(a, b); }
static uint32_t multiply_fp16(uint32_t a, uint32_t b) { return product(a, b); }
static uint32_t add_fp16(uint32_t a, uint32_t b) {
  return pairs([=](int i) { return rounded(as_double(a >> i & 0xffff) + as_double(b >> i & 0xffff)); });
}
static uint32_t fp16_of_e4m3(uint32_t word, int half) {
  return pairs([=](int i) { return rounded(number(word >> (16 * half + i / 2) & 0xff, 4, 3, 7)); });
}
static uint32_t masked_with(uint32_t a, uint32_t mask, uint32_t more) { return (a & mask) | more; }
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, int by) { return low >> by | high << (32 - by); }
static uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = select >> 4 * i & 15, from = (digit & 4 ? b : a) >> digit % 4 * 8 & 0xff;
    d |= (digit & 8 ? (from & 0x80 ? 0xff : 0) : from) << 8 * i;
  }
  return d;
}
static uint32_t both(uint32_t pair, int half) { return (pair >> 16 * half & 0xffff) * 0x10001; }
PART

// A `Decode` with these scales and zero points, with those of them that it has.
template <class D> static D made(uint32_t scales, uint32_t zeros) {
  if constexpr (std::is_constructible_v<D, uint32_t, uint32_t>) return D(scales, zeros);
  else if constexpr (std::is_constructible_v<D, uint32_t>) return D(kScaled ? scales : zeros);
  else return D();
}

// Runs `Decode` for every code in every place, and every zero point or power of two beside it.
static std::mt19937 random_bits(7);

static double value(int code) {  // of a stored code, without its zero point
  if (kFormat == "int4" && kA == "e4m3") return code % 2 ? -1 - code / 2 : code / 2;
  if (kFormat == "int4" && kA == "int8") return code < 8 ? code : code - 16;
  if (kFormat == "int4") return code - 8;
  if (kFormat == "uint4") return code;
  if (kFormat == "int8" && kA == "int8") return int8_t(code);
  if (kFormat == "int2") return kA == "int8" ? (code < 2 ? code : code - 4) : code - 2;
  if (kFormat == "int8") return code - 128;
  if (kFormat == "mxfp4" || kFormat == "nvfp4") return number(code, 2, 1, 1);
  return number(code, 4, 3, 7);
}

static bool is_number(int code) { return (kFormat != "e4m3" && kFormat != "mxfp8") || (code & 0x7f) != 0x7f; }

static double element(uint32_t bits) {
  if (kA == "int8") return int8_t(bits);
  if (kA == "e4m3") return number(bits, 4, 3, 7);
  return as_double(bits);
}

// A scale as decoding parts are given it, of any size from 2^-10 to the largest there may be, and that too.
static double scale(uint32_t& bits) {
  const bool largest = random_bits() % 8 == 0;
  if (kFormat == "mxfp4" || kFormat == "mxfp8") {  // e8m0
    const uint32_t top = 127 + std::ilogb(kLargestScale);
    bits = largest ? top : 104 + random_bits() % (top - 103);
    return std::ldexp(1, int(bits) - 127);
  }
  if (kFormat == "nvfp4") {  // e4m3, of either sign
    bits = random_bits() % 127 | (random_bits() & 1) << 7;
    return number(bits, 4, 3, 7);
  }
  const double size = std::ldexp(1 + random_bits() % 1024 / 1024.0, int(random_bits() % 21) - 10);
  bits = rounded(largest || size > kLargestScale ? kLargestScale : size) | (random_bits() & 1) << 15;
  return as_double(bits);
}

int main() {
  const int elements = kStep / 8, width = 16 / elements * 2, of_step = 4 * elements, all = kStepsOfWords * of_step;
  const int lasts = kFormat == "uint4" ? 16 : 0;
  long checked = 0;
  for (int round = 0; round < kCodes * all; ++round)  // a code in a place, among any
    for (int beside = 0; beside <= lasts; ++beside) {
      int codes[16];
      uint32_t words[Decode::kWords] = {}, registers[4 * kStepsOfWords];
      for (int i = 0; i < all; ++i) {
        codes[i] = round / all;
        while (i != round % all || !is_number(codes[i])) {
          codes[i] = random_bits() % kCodes;
          if (is_number(codes[i])) break;
        }
        for (int bit = 0; bit < kBits; ++bit) {
          const int at = place(i, bit);
          if (words[at / 32] >> at % 32 & 1) return std::printf("two codes have bit %d\n", at), 1;
          words[at / 32] |= uint32_t(codes[i] >> bit & 1) << at % 32;
        }
      }
      // Rows r and r + 8 have their own.
      const int other = lasts ? (beside * 7 + 3) % (lasts + 1) : 0;
      uint32_t bits[2] = {};
      double scales[2] = {1, 1};
      if (kScaled)
        for (int row = 0; row < 2; ++row) scales[row] = scale(bits[row]);
      const auto decode = made<Decode>(
          bits[0] | bits[1] << (kFormat == "mxfp4" || kFormat == "mxfp8" || kFormat == "nvfp4" ? 8 : 16), beside | other << 8);
      for (int step = 0; step < kStepsOfWords; ++step) {
        uint32_t own[4];
        STEP(decode, words, step, own);
        for (int i = 0; i < 4; ++i) registers[4 * step + i] = own[i];
      }
      for (int i = 0; i < all; ++i) {
        const int own = i / elements % 2 ? other : beside;
        double wanted = value(codes[i]);
        if (kFormat == "uint4") wanted -= own;
        wanted *= scales[i / elements % 2] / Decode::kUnit;
        if (kScaled && kFormat != "nvfp4") wanted = as_double(rounded(wanted));
        const double found = element(registers[i / elements] >> i % elements * width & ((1ull << width) - 1));
        if (found != wanted)
          return std::printf("code %d beside %d at %d is %g, not %g\n", codes[i], own, i, found, wanted), 1;
        ++checked;
      }
    }
  return checked < kCodes * all;
}
