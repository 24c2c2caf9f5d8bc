// activation_backward_sm90a_bf16_fp32_bf16_gelu_256x64_6730b270
//
// dz = dy * f'(z), where f is gelu
//   dy bf16, z fp32, dz bf16
//   64 columns of a block of 256 threads, 64 rows at a time, 4 blocks of a multiprocessor
// Digest 6730b270d6aaab4f11c194b2dc754747c8e1c0ae76d4504eaed8f741d9a597f5; `warploom show` prints this file.
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
using Z = float;
using Dz = cutlass::bfloat16_t;
// Threads of a block, and those that are to run at a time; rows that a thread reads at once.
constexpr int kThreads = 256, kBlocks = 4, kRows = 2;
// A thread has kValues columns of every kLanes-th row of a block's kColumns.
constexpr int kValues = 8, kColumns = 64;
constexpr int kLanes = kThreads * kValues / kColumns;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* dy;  // [m][pitch]
  const float* z;  // [m][pitch]
  cutlass::bfloat16_t* dz;  // [m][pitch]
  int64_t dy_pitch;  // elements between rows of dy
  int64_t z_pitch;  // elements between rows of z
  int64_t dz_pitch;  // elements between rows of dz
  int32_t m;  // rows
  int32_t n;  // columns
  int32_t strips;  // parts of the columns
  int32_t rows;  // of a part of the rows
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, dy) == 0 && OFFSET(Parameters, z) == 8);
static_assert(OFFSET(Parameters, dz) == 16 && OFFSET(Parameters, dy_pitch) == 24);
static_assert(OFFSET(Parameters, z_pitch) == 32 && OFFSET(Parameters, dz_pitch) == 40);
static_assert(OFFSET(Parameters, m) == 48 && OFFSET(Parameters, n) == 52);
static_assert(OFFSET(Parameters, strips) == 56 && OFFSET(Parameters, rows) == 60);

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

// Phi(x) + x phi(x), the derivative of x Phi(x): Phi, the normal distribution function, by the rational
// approximation of erfc in Abramowitz and Stegun 7.1.26 (|error| < 1.5e-7). Exactly 0 and 1 far from 0.
struct GeluGradient {
  __device__ __forceinline__ static float slope(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * x * x));  // exp(-x^2 / 2)
    float tail = fmaf(t, 0.530702714f, -0.726576013f);  // half of erfc's coefficients
    tail = fmaf(t, fmaf(t, fmaf(t, tail, 0.710706870f), -0.142248368f), 0.127414796f) * t * power;
    const float limit = x < 0.f ? tail : 1.f - tail;
    return power == 0.f ? limit : fmaf(0.398942280f * x, power, limit);  // x may be infinite there
  }
};

using Gradient = GeluGradient;

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
        dz.values[j] = Dz(value);
      }
      dz.template store<kWhole>(p.dz + at * p.dz_pitch + column, count);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    activation_backward_sm90a_bf16_fp32_bf16_gelu_256x64_6730b270(const __grid_constant__ Parameters p) {
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
}
