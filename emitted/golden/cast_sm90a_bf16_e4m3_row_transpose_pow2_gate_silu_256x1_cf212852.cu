// cast_sm90a_bf16_e4m3_row_transpose_pow2_gate_silu_256x1_cf212852
//
// x bf16 to q e4m3 with computed fp32 scales of a row, powers of two; of x.T too
//   what is quantized is  silu(gate) * up, in the type of x
//   rounded to nearest; 256 threads a CTA
// Two kernels: factors, of rows and columns, and main, which reads them.
// Digest cf212852150fc2550a62f95b8878e9b989c3dd16d0da8d6ba01a27106371e83a; `warploom show` prints this file.
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

// x / (1 + exp(-x)).
struct Silu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) { return x * logistic2(1.44269504f * x); }
};

constexpr int kThreads = 256, kVectors = 1;
// A thread quantizes kValues values of a row at once; kLanes threads share a part of kColumns columns.
constexpr int kValues = 8, kColumns = 128, kLanes = kColumns / kValues;
constexpr bool kIsFp8 = true;
constexpr float kLargest = 448.f;  // of q
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  float* scale;  // of blocks of x
  uint8_t* q_t;  // [n][q_t_pitch]: q of x.T
  float* scale_t;  // of blocks of x.T
  float* factors;  // what rows and, behind all, columns are multiplied by
  float* peaks;  // [across][rows], [down][columns]: of parts of them
  unsigned* done;  // [down + across]: left as zeros; CTAs of a part
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int64_t q_t_pitch;  // bytes between rows of q_t
  int64_t scale_t_down;  // elements to that below
  int64_t scale_t_across;  // elements to the next
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, q_t) == 24);
static_assert(OFFSET(Parameters, scale_t) == 32 && OFFSET(Parameters, factors) == 40);
static_assert(OFFSET(Parameters, peaks) == 48 && OFFSET(Parameters, done) == 56);
static_assert(OFFSET(Parameters, x_pitch) == 64 && OFFSET(Parameters, q_pitch) == 72);
static_assert(OFFSET(Parameters, scale_down) == 80 && OFFSET(Parameters, scale_across) == 88);
static_assert(OFFSET(Parameters, q_t_pitch) == 96 && OFFSET(Parameters, scale_t_down) == 104);
static_assert(OFFSET(Parameters, scale_t_across) == 112 && OFFSET(Parameters, m) == 120);
static_assert(OFFSET(Parameters, n) == 124 && OFFSET(Parameters, across) == 128);

// ---- Vectors of x -------------------------------------------------------------------------------------
// The larger one; NaN wins over every number.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Values of a row that follow each other.
struct Vector {
  static constexpr int kWords = kValues * sizeof(X) / sizeof(uint4);
  union {
    uint4 words[kWords];
    X values[kValues];
  };

  __device__ __forceinline__ Vector() {}

  // Those past `count` are zeros.
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

// Whether 16 bytes of each row can be moved at once.
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
// What values are multiplied by, of the largest magnitude of a block. Where that is 0, infinite or NaN it is 1.
__device__ __forceinline__ float factor_of(float peak) {
  float factor = fminf(__fdiv_rn(kLargest, peak), 3.402823466e38f);
  factor = __uint_as_float(__float_as_uint(factor) & 0x7f800000);
  return peak > 0.f && peak < infinity() ? factor : 1.f;
}
// The scale of a factor, as it is stored.
__device__ __forceinline__ float scale_of(float factor) { return __frcp_rn(factor); }

// ---- Rounding -----------------------------------------------------------------------------------------
struct Random {
  __device__ __forceinline__ explicit Random(const Parameters&) {}
  __device__ __forceinline__ void draw(int, int, int) {}
  __device__ __forceinline__ uint32_t number(int) const { return 0; }
};
__device__ __forceinline__ float rounded(float value, uint32_t) { return value; }  // as it is converted

// ---- Values of q --------------------------------------------------------------------------------------
// Four values of q, of which the first has the lowest byte; what is too large becomes the largest.
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

// What an infinite value is: infinite in e5m2, NaN in e4m3, which has no infinity. int8 has its largest number, as
// everything has that is too large.
__device__ __forceinline__ uint32_t code_of_infinity(bool is_negative) {
  return 0x7f | (is_negative ? 0x80 : 0);
}

// The values of a vector; infinite ones as if they were finite.
template <class Value>
__device__ __forceinline__ Bytes quantized(Value&& x, float factor, const Random& random) {
  uint32_t words[kValues / 4];
  CUTE_UNROLL
  for (int i = 0; i < kValues / 4; ++i) {
    float four[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j] = rounded(__fmul_rn(x(4 * i + j), factor), random.number(4 * i + j));
    words[i] = packed(four[0], four[1], four[2], four[3]);
  }
  return make_uint2(words[0], words[1]);
}

// ---- Tiles of 128 rows and columns ------------------------------------------------------------------------
// A thread has kDown rows of kValues columns: they stay in registers until x and x.T are quantized.
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
  alignas(16) bool is_last[2];  // whether a CTA is the last of its rows, and of its columns
};
static_assert(sizeof(Shared) == 17424);

// The magnitudes that a register has: two.
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

// A value of it. Written out for bf16, of which the compiler shifts the upper half down, and up again.
__device__ __forceinline__ float value_of(const Vector& vector, int i) {
  const uint32_t word = reinterpret_cast<const Word*>(vector.words)[i / 2];
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000);
}

using Function = Silu;

// What the function makes of a gate.
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

// Columns of two matrices, or of a gate and up, make those that are quantized.
__device__ __forceinline__ Vector pairs(const float (&values)[kValues]) {
  Vector result;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(reinterpret_cast<Word*>(result.words)[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  return result;
}

// Computes what a thread has of a tile; what is past the ends are zeros.
__device__ __forceinline__ void load(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  const int row = row0 + threadIdx.x / kLanes * kDown, column = column0 + threadIdx.x % kLanes * kValues;
  const bool is_aligned = aligned(p.x, p.x_pitch) && p.n * sizeof(X) % sizeof(uint4) == 0;
  const bool is_whole = is_aligned && row0 + kTile <= p.m && column0 + kTile <= p.n;
  Vector gate[kDown], up[kDown];
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    const int count = is_whole ? kValues : row + i < p.m ? p.n - column : 0;
    const X* from = p.x + (row + i) * p.x_pitch + column;
    gate[i].load(from, count, is_aligned), up[i].load(from + p.n, count, is_aligned);
  }
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    float values[kValues];
    activate(gate[i], values);
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) values[j] *= value_of(up[i], j);
    x[i] = pairs(values);
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

// ---- Factors of rows and columns ----------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cast_sm90a_bf16_e4m3_row_transpose_pow2_gate_silu_256x1_cf212852_factors(const __grid_constant__ Parameters p) {
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int tiles_down = (p.m + kTile - 1) / kTile, down = blockIdx.x / p.across, part = blockIdx.x % p.across;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  Vector x[kDown];
  load(p, x, down * kTile, part * kTile);
  write(&shared.peaks[0][lane][group * kDown], peaks_of_rows(x));
  write(&shared.peaks[1][group][lane * kValues], peaks_of_columns(x));
  __syncthreads();
  // From here on a thread has a row of x, or of x.T, and parts of it, of which the tile is one.
  const int side = threadIdx.x / kTile, row = threadIdx.x % kTile;
  const int rows = (side == 0 ? tiles_down : p.across) * kTile, parts = side == 0 ? p.across : tiles_down;
  const int own = side == 0 ? part : down, above = (side == 0 ? down : part) * kTile + row;
  float peak = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kLanes; ++i) peak = larger(peak, float(shared.peaks[side][i][row]));
  float* peaks = p.peaks + (side == 0 ? 0 : tiles_down * p.across * kTile) + above;
  __stcg(peaks + own * rows, peak);
  __threadfence();
  __syncthreads();
  if (row == 0) {
    unsigned* done = p.done + (side == 0 ? down : tiles_down + part);
    shared.is_last[side] = atomicInc(done, parts - 1) == parts - 1;
  }
  __syncthreads();
  if (!shared.is_last[side]) return;
  __threadfence();  // the last CTA: all others have written theirs
  _Pragma("unroll 8")
  for (int i = 0; i < parts; ++i) peak = larger(peak, __ldcg(peaks + i * rows));
  const float factor = factor_of(peak);
  p.factors[(side == 0 ? 0 : tiles_down * kTile) + above] = factor;
  if (above < (side == 0 ? p.m : p.n))
    (side == 0 ? p.scale : p.scale_t)[above * (side == 0 ? p.scale_down : p.scale_t_down)] = scale_of(factor);
}

// Reads those of the tile.
__device__ __forceinline__ void read_factors(const Parameters& p, Shared& shared, int row0, int column0) {
  const int side = threadIdx.x / kTile, row = threadIdx.x % kTile, behind = (p.m + kTile - 1) / kTile * kTile;
  shared.factors[side][0][row] = p.factors[(side == 0 ? row0 : behind + column0) + row];
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
    cast_sm90a_bf16_e4m3_row_transpose_pow2_gate_silu_256x1_cf212852(const __grid_constant__ Parameters p) {
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  [[maybe_unused]] Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int tile = gridDim.x - 1 - blockIdx.x;  // from the end of x, which L2 still has of the launch before
  const int down = tile / p.across, part = tile % p.across;
  const int row0 = down * kTile, column0 = part * kTile;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;  // its columns; its rows
  const int row = row0 + group * kDown, column = column0 + lane * kValues;
  const bool is_whole = row0 + kTile <= p.m && column0 + kTile <= p.n;
  const bool q_aligned = aligned(p.q, p.q_pitch);

  Vector x[kDown];
  load(p, x, row0, column0);
  read_factors(p, shared, row0, column0);
  const Vector of_columns = peaks_of_columns(x);
  const float peak = of_columns.peak();
  Random random(p);
  __syncthreads();
  const float* factors = &shared.factors[0][0][group * kDown];
  uint2 q[kDown];
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    random.draw(row + i, column, 0);
    const auto value = [&](int j) { return value_of(x[i], j); };
    q[i] = quantized(value, factors[i], random);
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
    random.draw(column + j, row, 1);
    const auto value = [&](int i) { return value_of(x[i], j); };
    uint2 bytes = quantized(value, factors_t[j], random);
    shared.q[row_t][place(row_t, group)] = bytes;
  }
  __syncthreads();
  store_transposed(p, shared, row0, column0);
  rewrite_infinities(p, x, peak, 1.f, row, column);
}
