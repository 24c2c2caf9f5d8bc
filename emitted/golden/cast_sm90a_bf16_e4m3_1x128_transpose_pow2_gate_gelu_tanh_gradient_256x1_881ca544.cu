// cast_sm90a_bf16_e4m3_1x128_transpose_pow2_gate_gelu_tanh_gradient_256x1_881ca544
//
// x bf16 to q e4m3 with computed fp32 scales of blocks of 1x128, powers of two; of x.T too
//   what is quantized is the gradient of z, gate and up, of gelu_tanh(gate) * up, in the type of x
//   rounded to nearest; 256 threads a CTA
// Digest 881ca544ccc9f8a091d59796b234ba79b5f8b1e1040d96d98299b659f5b7076b; `warploom show` prints this file.
#if defined(__CUDACC_RTC__)  // NVRTC has no host standard library; CUTLASS 4.2 names these two of it
#include <cuda/std/type_traits>
namespace std {
template <class T> inline constexpr bool is_pointer_v = cuda::std::is_pointer_v<T>;
template <class... T> using void_t = cuda::std::void_t<T...>;
}  // namespace std
#define OFFSET(type, field) __INTADDR__(&((const volatile type*)0)->field)
#else
#include <cstddef>
#define OFFSET(type, field) offsetof(type, field)
#endif
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/numeric_types.h"

using X = cutlass::bfloat16_t;
// 1 / (1 + 2^-x) by the two fast units; exact limits at both infinities, NaN stays NaN.
__device__ __forceinline__ float logistic2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2u)): no
// cancellation in the negative tail.
struct GeluTanh {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    constexpr float kScale = 2.f * 0.79788456f * 1.44269504f;  // 2 sqrt(2 / pi) log2(e)
    return x * logistic2(x * fmaf(kScale * 0.044715f, x * x, kScale));
  }
};

// s + x s (1 - s) 2 u' with s = 1 / (1 + exp(-2u)) and u = sqrt(2 / pi) (x + 0.044715 x^3), the derivative
// of x s. The smaller of s and 1 - s is computed: no cancellation in either tail.
struct GeluTanhGradient {
  __device__ __forceinline__ static float slope(float x) {
    constexpr float kScale = 2.f * 0.79788456f, kLog2 = 1.44269504f;  // 2 sqrt(2 / pi), log2(e)
    const float square = x * x;
    const float small = logistic2(-kLog2 * fabsf(x) * fmaf(kScale * 0.044715f, square, kScale));
    const float large = 1.f - small, limit = x < 0.f ? small : large;
    const float rise = x * fmaf(kScale * 3.f * 0.044715f, square, kScale);  // x 2u'
    return small == 0.f ? limit : fmaf(rise * small, large, limit);  // rise may be infinite there
  }
};

constexpr int kThreads = 256;
constexpr int kValues = 8;  // of a row, that a thread quantizes at once
constexpr int kColumns = 128, kLanes = kColumns / kValues;  // kLanes threads have kColumns columns of a row
constexpr float kLargest = 448.f;  // of q
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  float* scale;  // of blocks of x
  uint8_t* q_t;  // [n][q_t_pitch]: q of x.T
  float* scale_t;  // of blocks of x.T
  const cutlass::bfloat16_t* gradient;  // [m][gradient_pitch]
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int64_t q_t_pitch;  // bytes between rows of q_t
  int64_t scale_t_down;  // elements to that below
  int64_t scale_t_across;  // elements to the next
  int64_t gradient_pitch;  // between its rows
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, q_t) == 24);
static_assert(OFFSET(Parameters, scale_t) == 32 && OFFSET(Parameters, gradient) == 40);
static_assert(OFFSET(Parameters, x_pitch) == 48 && OFFSET(Parameters, q_pitch) == 56);
static_assert(OFFSET(Parameters, scale_down) == 64 && OFFSET(Parameters, scale_across) == 72);
static_assert(OFFSET(Parameters, q_t_pitch) == 80 && OFFSET(Parameters, scale_t_down) == 88);
static_assert(OFFSET(Parameters, scale_t_across) == 96 && OFFSET(Parameters, gradient_pitch) == 104);
static_assert(OFFSET(Parameters, m) == 112 && OFFSET(Parameters, n) == 116);
static_assert(OFFSET(Parameters, across) == 120);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Vectors of x -------------------------------------------------------------------------------------
// max(a, b) that returns NaN where either is.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// kValues adjacent values of a row.
struct Vector {
  static constexpr int kWords = kValues * sizeof(X) / sizeof(uint4);
  union {
    uint4 words[kWords];
    X values[kValues];
  };

  __device__ __forceinline__ Vector() {}

  // Loads the first `count` values, and zeros for the others.
  __device__ __forceinline__ void load(const X* from, int count, bool aligned) {
    if (aligned && count >= kValues) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) values[i] = i < count ? from[i] : X(0.f);
    }
  }

  __device__ __forceinline__ float peak() const {
    float peak = fabsf(float(values[0]));
    CUTE_UNROLL
    for (int i = 1; i < kValues; ++i) peak = larger(peak, fabsf(float(values[i])));
    return peak;
  }
};

// Whether every row starts at a multiple of 16 bytes.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// Writes the first `count` of 8 or 16 bytes.
template <class Bytes>
__device__ __forceinline__ void store(uint8_t* to, const Bytes& bytes, int count, bool aligned) {
  constexpr int kCount = sizeof(Bytes);
  if (aligned && count >= kCount) {
    *reinterpret_cast<Bytes*>(to) = bytes;
  } else {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&bytes);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) to[i] = uint8_t(words[i / 4] >> i % 4 * 8);
  }
}

// ---- Scales -------------------------------------------------------------------------------------------
// The factor that values are multiplied by, from a block's largest magnitude; 1 where this is 0, infinite or NaN.
__device__ __forceinline__ float factor_of(float peak) {
  float factor = fminf(__fdiv_rn(kLargest, peak), 3.402823466e38f);
  factor = __uint_as_float(__float_as_uint(factor) & 0x7f800000);
  return peak > 0.f && peak < infinity() ? factor : 1.f;
}
// The scale of a factor, as it is stored.
__device__ __forceinline__ float scale_of(float factor) { return __frcp_rn(factor); }

// ---- Values of q --------------------------------------------------------------------------------------
// Converts four values to q, saturating; the first is the lowest byte.
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

using Bytes = uint2;
static_assert(sizeof(Bytes) == kValues);

// The code of an infinite value: NaN, since e4m3 has no infinity.
__device__ __forceinline__ uint32_t code_of_infinity(bool is_negative) {
  return 0x7f | (is_negative ? 0x80 : 0);
}

// Quantizes a vector; infinite values saturate here, and are written again later.
template <class Value>
__device__ __forceinline__ Bytes quantized(Value&& x, float factor) {
  uint32_t words[kValues / 4];
  CUTE_UNROLL
  for (int i = 0; i < kValues / 4; ++i) {
    float four[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j] = __fmul_rn(x(4 * i + j), factor);
    words[i] = packed(four[0], four[1], four[2], four[3]);
  }
  return make_uint2(words[0], words[1]);
}

// ---- Tiles of 128 rows and columns ------------------------------------------------------------------------
// A thread holds kDown rows by kValues columns in registers until x and x.T are quantized.
constexpr int kTile = kColumns, kDown = 8;
static_assert(kDown == kValues && kThreads == kLanes * kLanes);

struct Shared {
  union {
    uint2 q[kTile][kTile / kDown];  // of x.T
    // Of each row of x, and of x.T, by each thread that has a part of it; threads write to different banks.
    X peaks[2][kLanes][kTile + sizeof(uint4) / sizeof(X)];
    float peaks_of_warps[kThreads / 32];
  };
  float factors[2][1][kTile];  // of x and of x.T, for each block of a row
};
static_assert(sizeof(Shared) == 17408);

// One register of magnitudes: two values.
using Word = uint32_t;
__device__ __forceinline__ uint32_t magnitude(uint32_t word) { return word & 0x7fff7fff; }
__device__ __forceinline__ uint32_t larger_each(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
constexpr int kWords = kValues * sizeof(X) / sizeof(Word);
__device__ __forceinline__ Word magnitude(const Vector& vector, int i) {
  return magnitude(reinterpret_cast<const Word*>(vector.words)[i]);
}

// Value i of a vector. By shifts: the compiler would move a bf16 upper half down and up again.
__device__ __forceinline__ float value_of(const Vector& vector, int i) {
  const uint32_t word = reinterpret_cast<const Word*>(vector.words)[i / 2];
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000);
}

using Function = GeluTanh;
using Slope = GeluTanhGradient;

// The activation function of a vector of the gate.
__device__ __forceinline__ void activate(const Vector& gate, float (&values)[kValues]) {
  CUTE_UNROLL
  for (int i = 0; i < kValues; i += 4) {
    float four[2][2];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j / 2][j % 2] = value_of(gate, i + j);
    Function().apply(four);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) values[i + j] = four[j / 2][j % 2];
  }
}

// Rounds a thread's values of a row to the type of x, in which a gate's result would be stored.
__device__ __forceinline__ Vector pairs(const float (&values)[kValues]) {
  Vector result;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(reinterpret_cast<Word*>(result.words)[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  return result;
}

// The gradient of gelu_tanh(gate) * up, of gate or of up.
template <bool kOfUp>
__device__ __forceinline__ Vector differentiate(const Vector& gradient, const Vector& gate, const Vector& up) {
  float values[kValues];
  if (kOfUp) activate(gate, values);
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i)
    values[i] = value_of(gradient, i) * (kOfUp ? values[i] : value_of(up, i) * Slope::slope(value_of(gate, i)));
  return pairs(values);
}

// Computes what a thread has of a tile, which is of gate or of up; what is past the ends are zeros.
template <bool kOfUp>
__device__ __forceinline__ void load_gradient(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  const int row = row0 + threadIdx.x / kLanes * kDown, column = column0 + threadIdx.x % kLanes * kValues;
  const int half = p.n / 2, own = column - (kOfUp ? half : 0);
  const bool is_aligned = aligned(p.x, p.x_pitch) && aligned(p.gradient, p.gradient_pitch);
  const bool is_whole = is_aligned && row0 + kTile <= p.m;
  constexpr int kAtOnce = kDown / 2;  // rows that are loaded before the first is computed: more spill
  CUTE_UNROLL
  for (int first = 0; first < kDown; first += kAtOnce) {
    Vector gradient[kAtOnce], gate[kAtOnce], up[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = row + first + i, count = is_whole || at < p.m ? kValues : 0;
      const X* from = p.x + at * p.x_pitch + own;
      gradient[i].load(p.gradient + at * p.gradient_pitch + own, count, is_aligned);
      gate[i].load(from, count, is_aligned);
      if (!kOfUp) up[i].load(from + half, count, is_aligned);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) x[first + i] = differentiate<kOfUp>(gradient[i], gate[i], up[i]);
  }
}

__device__ __forceinline__ void load(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  if (column0 < p.n / 2) {  // a multiple of kTile
    load_gradient<false>(p, x, row0, column0);
  } else {
    load_gradient<true>(p, x, row0, column0);
  }
}

// The largest magnitudes of a thread's columns.
__device__ __forceinline__ Vector peaks_of_columns(const Vector (&x)[kDown]) {
  Vector peaks;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i) {
    Word peak = magnitude(x[0], i);
    CUTE_UNROLL
    for (int row = 1; row < kDown; ++row) peak = larger_each(peak, magnitude(x[row], i));
    reinterpret_cast<Word*>(peaks.words)[i] = peak;
  }
  return peaks;
}

// The same, of its rows.
__device__ __forceinline__ Vector peaks_of_rows(const Vector (&x)[kDown]) {
  Word peaks[kDown];
  CUTE_UNROLL
  for (int row = 0; row < kDown; ++row) {
    peaks[row] = magnitude(x[row], 0);
    CUTE_UNROLL
    for (int i = 1; i < kWords; ++i) peaks[row] = larger_each(peaks[row], magnitude(x[row], i));
  }
  Vector result;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i)
    reinterpret_cast<Word*>(result.words)[i] = larger_each(__byte_perm(peaks[2 * i], peaks[2 * i + 1], 0x5410),
                                                           __byte_perm(peaks[2 * i], peaks[2 * i + 1], 0x7632));
  return result;
}

__device__ __forceinline__ void write(X* to, const Vector& vector) {
  CUTE_UNROLL
  for (int i = 0; i < Vector::kWords; ++i) reinterpret_cast<uint4*>(to)[i] = vector.words[i];
}

// Computes the scales of the tile: a thread those of a row of x, or of x.T.
__device__ __forceinline__ void scale_rows(const Parameters& p, Shared& shared, int row0, int column0) {
  const int side = threadIdx.x / kTile, row = threadIdx.x % kTile;
  const int above = side == 0 ? row0 : column0, before = side == 0 ? column0 : row0;
  const int rows = side == 0 ? p.m : p.n;
  auto* scales = side == 0 ? p.scale : p.scale_t;
  const int64_t scales_down = side == 0 ? p.scale_down : p.scale_t_down;
  const int64_t scales_across = side == 0 ? p.scale_across : p.scale_t_across;
  constexpr int kBlocks = sizeof(shared.factors[0]) / sizeof(shared.factors[0][0]), kEach = kLanes / kBlocks;
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    float peak = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kEach; ++i) peak = larger(peak, float(shared.peaks[side][block * kEach + i][row]));
    const float factor = factor_of(peak);
    shared.factors[side][block][row] = factor;
    const int column = before + block * (kTile / kBlocks);
    if (above + row < rows)
      scales[(above + row) * scales_down + column / (kTile / kBlocks) * scales_across] = scale_of(factor);
  }
}

// Where the tile of q of x.T has 8 bytes of a row: those that threads write at once are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return chunk ^ row / kValues; }

// Writes it, whole rows of 128 bytes at a time.
__device__ __forceinline__ void store_transposed(const Parameters& p, const Shared& shared, int row0, int column0) {
  constexpr int kBytes = sizeof(uint4), kAcross = kTile / kBytes, kRows = kThreads / kAcross;  // at a time
  const bool is_aligned = aligned(p.q_t, p.q_t_pitch);
  const int lane = threadIdx.x % kAcross, first_row = threadIdx.x / kAcross;
  const int columns = p.m - (row0 + lane * kBytes);  // that there are from here on
  uint8_t* to = p.q_t + (column0 + first_row) * p.q_t_pitch + row0 + lane * kBytes;
  CUTE_UNROLL
  for (int i = 0; i < kTile / kRows; ++i, to += kRows * p.q_t_pitch) {
    const int row = i * kRows + first_row, first = place(row, 2 * lane);
    const uint4 both = *reinterpret_cast<const uint4*>(&shared.q[row][first & ~1]);
    const uint4 bytes = first % 2 == 0 ? both : make_uint4(both.z, both.w, both.x, both.y);
    if (column0 + row < p.n && columns > 0) store(to, bytes, columns, is_aligned);
  }
}

// Writes infinite values of a thread once more, after all threads have written them as if they were finite.
__device__ __forceinline__ void rewrite_infinities(const Parameters& p, const Vector (&x)[kDown], float peak, float factor, int row, int column) {
  __syncthreads();
  if (peak < infinity()) return;
  CUTE_UNROLL
  for (int across = 0; across < kValues; ++across) {
    CUTE_UNROLL
    for (int down = 0; down < kDown; ++down) {
      const float value = value_of(x[down], across);
      const int i = row + down, j = column + across;
      if (fabsf(value) != infinity() || i >= p.m || j >= p.n) continue;
      const uint8_t code = uint8_t(code_of_infinity((value < 0.f) != (factor < 0.f)));
      p.q[i * p.q_pitch + j] = code;
      p.q_t[j * p.q_t_pitch + i] = code;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cast_sm90a_bf16_e4m3_1x128_transpose_pow2_gate_gelu_tanh_gradient_256x1_881ca544(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  [[maybe_unused]] Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int tile = blockIdx.x;
  // Tiles of gate and of up that read the same follow each other.
  const int down = tile / p.across, part = tile % p.across % 2 * (p.across / 2) + tile % p.across / 2;
  const int row0 = down * kTile, column0 = part * kTile;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;  // its columns; its rows
  const int row = row0 + group * kDown, column = column0 + lane * kValues;
  const bool is_whole = row0 + kTile <= p.m && column0 + kTile <= p.n;
  const bool q_aligned = aligned(p.q, p.q_pitch);

  Vector x[kDown];
  load(p, x, row0, column0);
  const Vector of_columns = peaks_of_columns(x);
  const float peak = of_columns.peak();
  write(&shared.peaks[0][lane][group * kDown], peaks_of_rows(x));
  write(&shared.peaks[1][group][lane * kValues], of_columns);
  __syncthreads();
  scale_rows(p, shared, row0, column0);
  __syncthreads();
  const float* factors = &shared.factors[0][0][group * kDown];
  uint2 q[kDown];
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    const auto value = [&](int j) { return value_of(x[i], j); };
    q[i] = quantized(value, factors[i]);
  }
  uint8_t* to = p.q + row * p.q_pitch + column;
  if (is_whole && q_aligned) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, to += p.q_pitch) *reinterpret_cast<uint2*>(to) = q[i];
  } else if (column < p.n) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, to += p.q_pitch)
      if (row + i < p.m) store(to, q[i], p.n - column, q_aligned);
  }
  CUTE_UNROLL  // so that x is not kept as fp32 numbers from here on, which take twice its registers
  for (Vector& vector : x)
    for (uint4& words : vector.words) asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  const float* factors_t = &shared.factors[1][0][lane * kValues];
  CUTE_UNROLL
  for (int j = 0; j < kValues; ++j) {
    const int row_t = lane * kValues + j;
    const auto value = [&](int i) { return value_of(x[i], j); };
    uint2 bytes = quantized(value, factors_t[j]);
    shared.q[row_t][place(row_t, group)] = bytes;
  }
  __syncthreads();
  store_transposed(p, shared, row0, column0);
  rewrite_infinities(p, x, peak, 1.f, row, column);
}
