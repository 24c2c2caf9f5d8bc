// activation_backward_sm90a_bf16_gelu_tanh_sums_256x64_488fb45c
//
// dz = dy * f'(z), where f is gelu_tanh; and the sums of its columns, in fp32
//   dy bf16, z bf16, dz bf16
//   64 columns of a block of 256 threads, 64 rows at a time, 4 blocks of a multiprocessor
// Two kernels: main, and sums where rows are cut into several parts.
// Digest 488fb45cbf8f2a81b1d4aea1895e78d3a9ea02157b40eb84370ca2eb720d90c3; `warploom show` prints this file.
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

using Dy = cutlass::bfloat16_t;
using Z = cutlass::bfloat16_t;
using Dz = cutlass::bfloat16_t;
// Threads of a block, and those that are to run at a time; rows that a thread reads at once.
constexpr int kThreads = 256, kBlocks = 4, kRows = 2;
// A thread has kValues columns of every kLanes-th row of a block's kColumns.
constexpr int kValues = 8, kColumns = 64;
constexpr int kLanes = kThreads * kValues / kColumns;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* dy;  // [m][pitch]
  const cutlass::bfloat16_t* z;  // [m][pitch]
  cutlass::bfloat16_t* dz;  // [m][pitch]
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

// A thread's columns of one row.
template <class Element> union Values {
  uint4 words[kValues * sizeof(Element) / sizeof(uint4)];
  Element values[kValues];

  __device__ __forceinline__ Values() {}

  // Nobody reads them again: caches keep what is written instead. Of kWhole false, only the first `count`.
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

// Whether 16 bytes of each row can be moved at once.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// 1 / (1 + 2^-x) by the two fast units; exact limits at both infinities, NaN stays NaN.
__device__ __forceinline__ float logistic2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

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

using Gradient = GeluTanhGradient;

// The rows from `row` to `last` that are a thread's own, and what they add to its sums. Several are under way
// before the first is computed: those past the last are read as if they were the last.
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

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    activation_backward_sm90a_bf16_gelu_tanh_sums_256x64_488fb45c(const __grid_constant__ Parameters p) {
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
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
  // The sums of the threads that share columns, added from the first row on.
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

// ---- The sums of all parts -------------------------------------------------------------------------
// Threads of a block, and its columns: each thread adds every kGroups-th part, and then one adds their sums.
constexpr int kSumThreads = 1024, kSumColumns = 32, kGroups = kSumThreads / kSumColumns;

extern "C" __global__ void __launch_bounds__(kSumThreads)
    activation_backward_sm90a_bf16_gelu_tanh_sums_256x64_488fb45c_sums(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
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
