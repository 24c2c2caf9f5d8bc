// cast_sm90a_fp16_int8_tensor_static_transpose_stochastic_amax_256x1_369764c9
//
// x fp16 to q int8 with given fp32 scales of a tensor; of x.T too
//   rounded stochastically; 256 threads a CTA
// Digest 369764c9f8740d6ba4d3d34be3d6f415922aaa5474afdba0db931cc7bf29edad; `warploom show` prints this file.
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

using X = cutlass::half_t;
constexpr int kThreads = 256;
constexpr int kValues = 8;  // of a row, that a thread quantizes at once
constexpr int kColumns = 128, kLanes = kColumns / kValues;  // kLanes threads have kColumns columns of a row
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::half_t* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  const float* scale;  // of blocks of x
  uint8_t* q_t;  // [n][q_t_pitch]: q of x.T
  const uint2* state;  // [2]: seeds random numbers
  unsigned* amax;  // bits of an fp32 number, raised
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int64_t q_t_pitch;  // bytes between rows of q_t
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, q_t) == 24);
static_assert(OFFSET(Parameters, state) == 32 && OFFSET(Parameters, amax) == 40);
static_assert(OFFSET(Parameters, x_pitch) == 48 && OFFSET(Parameters, q_pitch) == 56);
static_assert(OFFSET(Parameters, scale_down) == 64 && OFFSET(Parameters, scale_across) == 72);
static_assert(OFFSET(Parameters, q_t_pitch) == 80 && OFFSET(Parameters, m) == 88);
static_assert(OFFSET(Parameters, n) == 92 && OFFSET(Parameters, across) == 96);

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

// The maximum over each kWidth adjacent lanes; all lanes of the warp must call it.
template <int kWidth> __device__ __forceinline__ float largest(float value) {
  CUTE_UNROLL
  for (int apart = kWidth / 2; apart > 0; apart /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffff, value, apart));
  return value;
}

// The maximum over a CTA; `shared` has an element for each warp.
template <int kWarps> __device__ __forceinline__ float largest_of_cta(float value, float* shared) {
  value = largest<32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % kWarps];
  return largest<kWarps>(value);
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
// The factor that values are multiplied by, from a scale: 0 from a scale of 0.
__device__ __forceinline__ float factor_of(float scale) {
  const float factor = __frcp_rn(scale);
  return fabsf(factor) == infinity() ? copysignf(scale == 0.f ? 0.f : 3.402823466e38f, scale) : factor;
}
__device__ __forceinline__ float read_factor(const Parameters& p, int row, int part) {
  return factor_of(p.scale[row * p.scale_down + part * p.scale_across]);
}

// ---- Rounding -----------------------------------------------------------------------------------------
// Random numbers of 16 bits: Philox4x32 (Salmon et al., 2011; 7 rounds, key 0). Its counter is the coordinates of 8
// values (the row, the group of 8 columns, 0 for x and 1 for x.T) XORed with Philox of the generator's state.
__device__ __forceinline__ uint4 philox(uint4 x) {
  CUTE_UNROLL
  for (int round = 0; round < 7; ++round) {
    const uint64_t first = uint64_t(x.x) * 0xd2511f53u, second = uint64_t(x.z) * 0xcd9e8d57u;
    x = make_uint4(uint32_t(second >> 32) ^ x.y ^ round * 0x9e3779b9u, uint32_t(second),
                   uint32_t(first >> 32) ^ x.w ^ round * 0xbb67ae85u, uint32_t(first));
  }
  return x;
}

struct Random {
  uint4 state;
  uint32_t words[kValues / 2];

  __device__ __forceinline__ explicit Random(const Parameters& p) {
    const uint2 low = p.state[0], high = p.state[1];
    state = philox(make_uint4(low.x, low.y, high.x, high.y));
  }
  // Draws numbers for values of a row, from a column that is a multiple of kValues.
  __device__ __forceinline__ void draw(int row, int column, int transposed) {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 8; ++i) {
      const uint4 four = philox(make_uint4(row ^ state.x, (column / 8 + i) ^ state.y, transposed ^ state.z, state.w));
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }
  __device__ __forceinline__ uint32_t number(int i) const { return words[i / 2] >> i % 2 * 16 & 0xffff; }
  // Orders the next numbers after these bytes: the numbers of all rows at once would spill.
  __device__ __forceinline__ void keep_order(uint2& bytes) {
    asm volatile("" : "+r"(bytes.x), "+r"(bytes.y), "+r"(state.x));
  }
};

// Rounds to a value of q below or above, so that the mean is `value`: adds a random number to the mantissa bits that q
// lacks, then clears them. Adding q's smallest normal number gives smaller magnitudes the same bits to clear.
__device__ __forceinline__ float rounded(float value, uint32_t number) {
  const float magnitude = fminf(fabsf(value), 128.f), base = 128.f;
  constexpr int kBits = 16;
  constexpr uint32_t kHalf = 0;
  uint32_t bits = __float_as_uint(__fadd_rn(magnitude, base));
  bits = (bits + ((number << (kBits - 16)) + kHalf)) & ~((1u << kBits) - 1);
  const float result = copysignf(__fsub_rn(__uint_as_float(bits), base), value);
  return value == value ? result : value;
}

// ---- Values of q --------------------------------------------------------------------------------------
// Converts four values to q, saturating; the first is the lowest byte.
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  uint32_t word;
  const int first = __float2int_rn(a), second = __float2int_rn(b), third = __float2int_rn(c), fourth = __float2int_rn(d);
  asm("{\n.reg .b32 high;\n"
      "cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}"
      : "=r"(word) : "r"(first), "r"(second), "r"(third), "r"(fourth));
  return word;
}

using Bytes = uint2;
static_assert(sizeof(Bytes) == kValues);

// Quantizes a vector.
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

// ---- The largest magnitude of x -----------------------------------------------------------------------
// Raises the bits of a number that is not negative to those of a CTA's largest; NaN wins.
__device__ __forceinline__ void raise(unsigned* bits, float peak) {
  atomicMax(reinterpret_cast<int*>(bits), __float_as_int(peak));
}

// ---- Tiles of 128 rows and columns ------------------------------------------------------------------------
// A thread holds kDown rows by kValues columns in registers until x and x.T are quantized.
constexpr int kTile = kColumns, kDown = 8;
static_assert(kDown == kValues && kThreads == kLanes * kLanes);

struct Shared {
  union {
    uint2 q[kTile][kTile / kDown];  // of x.T
    float peaks_of_warps[kThreads / 32];
  };
};
static_assert(sizeof(Shared) == 16384);

// One register of magnitudes: two values.
using Word = uint32_t;
__device__ __forceinline__ uint32_t magnitude(uint32_t word) { return word & 0x7fff7fff; }
__device__ __forceinline__ uint32_t larger_each(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
constexpr int kWords = kValues * sizeof(X) / sizeof(Word);
__device__ __forceinline__ Word magnitude(const Vector& vector, int i) {
  return magnitude(reinterpret_cast<const Word*>(vector.words)[i]);
}

// Value i of a vector.
__device__ __forceinline__ float value_of(const Vector& vector, int i) {
  return float(vector.values[i]);
}

// Loads what a thread has of a tile; what is past the ends of x are zeros.
__device__ __forceinline__ void load(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  const int row = row0 + threadIdx.x / kLanes * kDown, column = column0 + threadIdx.x % kLanes * kValues;
  const bool is_aligned = aligned(p.x, p.x_pitch);
  const X* from = p.x + row * p.x_pitch + column;
  if (is_aligned && row0 + kTile <= p.m && column0 + kTile <= p.n) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, kValues, true);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, row + i < p.m ? p.n - column : 0, is_aligned);
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

// Transposes the bytes of four words: the first has the lowest byte of all afterwards.
__device__ __forceinline__ void transpose(uint32_t (&words)[4]) {
  const uint32_t low[2] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
  words[0] = __byte_perm(low[0], low[1], 0x5410), words[1] = __byte_perm(low[0], low[1], 0x7632);
  words[2] = __byte_perm(high[0], high[1], 0x5410), words[3] = __byte_perm(high[0], high[1], 0x7632);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cast_sm90a_fp16_int8_tensor_static_transpose_stochastic_amax_256x1_369764c9(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  [[maybe_unused]] Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int tile = blockIdx.x;
  const int down = tile / p.across, part = tile % p.across;
  const int row0 = down * kTile, column0 = part * kTile;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;  // its columns; its rows
  const int row = row0 + group * kDown, column = column0 + lane * kValues;
  const bool is_whole = row0 + kTile <= p.m && column0 + kTile <= p.n;
  const bool q_aligned = aligned(p.q, p.q_pitch);

  Vector x[kDown];
  load(p, x, row0, column0);
  const Vector of_columns = peaks_of_columns(x);
  const float peak = of_columns.peak();
  Random random(p);
  const float factor = read_factor(p, row0, part);
  uint2 q[kDown];
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    random.draw(row + i, column, 0);
    const auto value = [&](int j) { return value_of(x[i], j); };
    q[i] = quantized(value, factor, random);
    random.keep_order(q[i]);
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
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t words[2][4];
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i) words[i / 4][i % 4] = half == 0 ? q[i].x : q[i].y;
    transpose(words[0]), transpose(words[1]);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int row_t = lane * kValues + half * 4 + j;
      shared.q[row_t][place(row_t, group)] = make_uint2(words[0][j], words[1][j]);
    }
  }
  __syncthreads();
  store_transposed(p, shared, row0, column0);
  __syncthreads();  // the transpose is read
  const float peak_of_all = largest_of_cta<kThreads / 32>(peak, shared.peaks_of_warps);
  if (threadIdx.x == 0) raise(p.amax, peak_of_all);
}
