// activation_backward_sm90a_fp16_relu_sums_128x128_rows4_blocks8_cb58aa99
//
// dz = dy * f'(z), where f is relu; and the sums of its columns, in fp32
//   dy fp16, z fp16, dz fp16
//   128 columns a CTA of 128 threads, 32 rows at a time, 8 CTAs an SM
// Two kernels: main, and sums, which adds up the partial sums of CTAs with the same columns.
// Digest cb58aa995550e47cdbcbb5953e324a5b668ea53b654d80b923f0a2227362567e; `warploom show` prints this file.
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

using Dy = cutlass::half_t;
using Z = cutlass::half_t;
using Dz = cutlass::half_t;
// kCtas: CTAs of an SM (launch bounds). kRows: rows that a thread has in flight.
constexpr int kThreads = 128, kCtas = 8, kRows = 4;
// A thread has kValues columns of every kLanes-th row; a CTA has kColumns columns.
constexpr int kValues = 8, kColumns = 128;
constexpr int kLanes = kThreads * kValues / kColumns;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::half_t* dy;  // [m][pitch]
  const cutlass::half_t* z;  // [m][pitch]
  cutlass::half_t* dz;  // [m][pitch]
  float* parts_sums;  // [parts][n]
  float* sums;  // [n]: parts_sums itself where there is one part
  int64_t dy_pitch;  // elements between rows of dy
  int64_t z_pitch;  // elements between rows of z
  int64_t dz_pitch;  // elements between rows of dz
  int32_t m;  // rows
  int32_t n;  // columns
  int32_t strips;  // parts of the columns
  int32_t rows;  // of a part of the rows
  int32_t parts;  // of the rows
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, dy) == 0 && OFFSET(Parameters, z) == 8);
static_assert(OFFSET(Parameters, dz) == 16 && OFFSET(Parameters, parts_sums) == 24);
static_assert(OFFSET(Parameters, sums) == 32 && OFFSET(Parameters, dy_pitch) == 40);
static_assert(OFFSET(Parameters, z_pitch) == 48 && OFFSET(Parameters, dz_pitch) == 56);
static_assert(OFFSET(Parameters, m) == 64 && OFFSET(Parameters, n) == 68);
static_assert(OFFSET(Parameters, strips) == 72 && OFFSET(Parameters, rows) == 76);
static_assert(OFFSET(Parameters, parts) == 80);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// A thread's columns of one row.
template <class Element> union Values {
  uint4 words[kValues * sizeof(Element) / sizeof(uint4)];
  Element values[kValues];

  __device__ __forceinline__ Values() {}

  // Streaming loads: x is read once, and L2 is left to what is written. kWhole: count >= kValues, and aligned.
  template <bool kWhole> __device__ __forceinline__ void load(const Element* from, int count) {
    if constexpr (kWhole) {
      CUTE_UNROLL
      for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i)
        words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) values[i] = i < count ? from[i] : Element(0.f);
    }
  }

  template <bool kWhole> __device__ __forceinline__ void store(Element* to, int count) const {
    if constexpr (kWhole) {
      CUTE_UNROLL
      for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i)
        reinterpret_cast<uint4*>(to)[i] = words[i];
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i)
        if (i < count) to[i] = values[i];
    }
  }
};

// Whether every row starts at a multiple of 16 bytes.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// Of max(x, 0): 0 at 0, NaN stays NaN.
struct ReluGradient {
  __device__ __forceinline__ static float slope(float x) { return x > 0.f ? 1.f : x <= 0.f ? 0.f : x; }
};

using Gradient = ReluGradient;

// Computes a thread's rows from `row` to `last`, and adds to its column sums. It loads kAtOnce rows before it computes
// the first; past the last row it loads that one again.
template <bool kWhole>
__device__ __forceinline__ void differentiate(const Parameters& p, int row, int last, int column,
                                              float (&sums)[kValues]) {
  constexpr int kAtOnce = kWhole ? kRows : 1;  // single elements take a register each for their address
  const int count = p.n - column;
  for (; row < last; row += kAtOnce * kLanes) {
    Values<Dy> dy[kAtOnce];
    Values<Z> z[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = min(row + i * kLanes, last - 1);
      dy[i].template load<kWhole>(p.dy + at * p.dy_pitch + column, count);
      z[i].template load<kWhole>(p.z + at * p.z_pitch + column, count);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = row + i * kLanes;
      if (at >= last) break;
      Values<Dz> dz;
      CUTE_UNROLL
      for (int j = 0; j < kValues; ++j) {
        const float value = float(dy[i].values[j]) * Gradient::slope(float(z[i].values[j]));
        sums[j] += value;
        dz.values[j] = Dz(value);
      }
      dz.template store<kWhole>(p.dz + at * p.dz_pitch + column, count);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
    activation_backward_sm90a_fp16_relu_sums_128x128_rows4_blocks8_cb58aa99(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  constexpr int kAcross = kColumns / kValues;  // threads that share a row
  const int part = blockIdx.x / p.strips, strip = blockIdx.x % p.strips;
  const int column = strip * kColumns + threadIdx.x % kAcross * kValues;
  const int row = part * p.rows + threadIdx.x / kAcross, last = min(p.m, (part + 1) * p.rows);
  float sums[kValues] = {};
  if (column + kValues <= p.n && aligned(p.dy, p.dy_pitch) && aligned(p.z, p.z_pitch) && aligned(p.dz, p.dz_pitch)) {
    differentiate<true>(p, row, last, column, sums);
  } else if (column < p.n) {
    differentiate<false>(p, row, last, column, sums);
  }
  // Adds up the sums of threads with the same columns, in a fixed order.
  __shared__ float4 shared[kThreads * kValues / 4];
  CUTE_UNROLL
  for (int i = 0; i < kValues / 4; ++i)
    shared[threadIdx.x * (kValues / 4) + i] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns && strip * kColumns + i < p.n; i += kThreads) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int lane = 0; lane < kLanes; ++lane)
      sum += reinterpret_cast<const float*>(shared)[lane * kColumns + i];
    p.parts_sums[int64_t(part) * p.n + strip * kColumns + i] = sum;
  }
}

// ---- The partial sums of all CTAs --------------------------------------------------------------------
// kGroups threads have a column: each adds every kGroups-th partial sum, and the first adds these.
constexpr int kSumThreads = 1024, kSumColumns = 32, kGroups = kSumThreads / kSumColumns;

extern "C" __global__ void __launch_bounds__(kSumThreads)
    activation_backward_sm90a_fp16_relu_sums_128x128_rows4_blocks8_cb58aa99_sums(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  __shared__ float shared[kGroups][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, group = threadIdx.x / kSumColumns;
  const int column = blockIdx.x * kSumColumns + lane;
  float sum = 0.f;
  if (column < p.n) {
#pragma unroll 4
    for (int part = group; part < p.parts; part += kGroups) sum += p.parts_sums[int64_t(part) * p.n + column];
  }
  shared[group][lane] = sum;
  __syncthreads();
  if (group > 0 || column >= p.n) return;
  sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kGroups; ++i) sum += shared[i][lane];
  p.sums[column] = sum;
}
