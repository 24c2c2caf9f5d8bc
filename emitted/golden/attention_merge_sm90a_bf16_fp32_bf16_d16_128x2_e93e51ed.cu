// attention_merge_sm90a_bf16_fp32_bf16_d16_128x2_e93e51ed
//
// Two partial results of attention, over keys that are not the same, as the result over all of them:
//   lse = log(exp(lse_a) + exp(lse_b)), out = (exp(lse_a) out_a + exp(lse_b) out_b) / exp(lse)
//   out_a bf16, out_b fp32, out bf16, 16 elements of a row; log-sum-exps fp32
// Digest e93e51ed8fed394f2824020aa337ca0b0f44856f0211af60fb470d8eeaf80381; `warploom show` prints this file.
//
// Launch: 128 threads; grid: one CTA per 64 rows
// 2 threads of a warp share a row, 8 elements of each at a time.
// Registers as the compiler allots them; neither shared memory nor barriers.
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

using A = cutlass::bfloat16_t;
using B = float;
using Out = cutlass::bfloat16_t;
constexpr int kThreads = 128, kDim = 16;
// Threads that share a row; elements that each moves at once, and how often, at most.
constexpr int kLanes = 2, kValues = 8, kVectors = 1;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* a;  // [rows][dim]
  const float* b;  // [rows][dim]
  cutlass::bfloat16_t* out;  // [rows][dim]
  const float* lse_a;  // [rows]
  const float* lse_b;  // [rows]
  float* lse;  // [rows]
  int64_t a_step0;  // elements of a from row to row, dimension 0
  int64_t a_step1;  // elements of a from row to row, dimension 1
  int64_t a_step2;  // elements of a from row to row, dimension 2
  int64_t b_step0;  // elements of b from row to row, dimension 0
  int64_t b_step1;  // elements of b from row to row, dimension 1
  int64_t b_step2;  // elements of b from row to row, dimension 2
  int64_t out_step0;  // elements of out from row to row, dimension 0
  int64_t out_step1;  // elements of out from row to row, dimension 1
  int64_t out_step2;  // elements of out from row to row, dimension 2
  int64_t lse_a_step0;  // elements of lse_a from row to row, dimension 0
  int64_t lse_a_step1;  // elements of lse_a from row to row, dimension 1
  int64_t lse_a_step2;  // elements of lse_a from row to row, dimension 2
  int64_t lse_b_step0;  // elements of lse_b from row to row, dimension 0
  int64_t lse_b_step1;  // elements of lse_b from row to row, dimension 1
  int64_t lse_b_step2;  // elements of lse_b from row to row, dimension 2
  int64_t lse_step0;  // elements of lse from row to row, dimension 0
  int64_t lse_step1;  // elements of lse from row to row, dimension 1
  int64_t lse_step2;  // elements of lse from row to row, dimension 2
  int32_t rows;  // of all dimensions
  int32_t extent1;  // rows of dimension 1
  int32_t extent2;  // rows of dimension 2
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, a) == 0 && OFFSET(Parameters, b) == 8);
static_assert(OFFSET(Parameters, out) == 16 && OFFSET(Parameters, lse_a) == 24);
static_assert(OFFSET(Parameters, lse_b) == 32 && OFFSET(Parameters, lse) == 40);
static_assert(OFFSET(Parameters, a_step0) == 48 && OFFSET(Parameters, a_step1) == 56);
static_assert(OFFSET(Parameters, a_step2) == 64 && OFFSET(Parameters, b_step0) == 72);
static_assert(OFFSET(Parameters, b_step1) == 80 && OFFSET(Parameters, b_step2) == 88);
static_assert(OFFSET(Parameters, out_step0) == 96 && OFFSET(Parameters, out_step1) == 104);
static_assert(OFFSET(Parameters, out_step2) == 112 && OFFSET(Parameters, lse_a_step0) == 120);
static_assert(OFFSET(Parameters, lse_a_step1) == 128 && OFFSET(Parameters, lse_a_step2) == 136);
static_assert(OFFSET(Parameters, lse_b_step0) == 144 && OFFSET(Parameters, lse_b_step1) == 152);
static_assert(OFFSET(Parameters, lse_b_step2) == 160 && OFFSET(Parameters, lse_step0) == 168);
static_assert(OFFSET(Parameters, lse_step1) == 176 && OFFSET(Parameters, lse_step2) == 184);
static_assert(OFFSET(Parameters, rows) == 192 && OFFSET(Parameters, extent1) == 196);
static_assert(OFFSET(Parameters, extent2) == 200);

// Some elements of a row, which lie at a multiple of 16 bytes.
template <class Element> union Values {
  uint4 words[kValues * sizeof(Element) / sizeof(uint4)];
  Element values[kValues];

  __device__ __forceinline__ Values() {}

  __device__ __forceinline__ void load(const Element* from) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }

  __device__ __forceinline__ void store(Element* to) const {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
};

// A row by its index along each dimension.
struct Place {
  int64_t at0, at1, at2;

  __device__ __forceinline__ int64_t of(int64_t step0, int64_t step1, int64_t step2) const {
    return at0 * step0 + at1 * step1 + at2 * step2;
  }
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Some have infinity where a row attended to nothing; here it is -infinity, of which exp is 0.
__device__ __forceinline__ float told(float lse) { return lse == infinity() ? -infinity() : lse; }

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_merge_sm90a_bf16_fp32_bf16_d16_128x2_e93e51ed(const __grid_constant__ Parameters p) {
  const int row = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int above = row / p.extent2;
  const Place place{above / p.extent1, above % p.extent1, row % p.extent2};
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (row >= p.rows) return;
  const float* lse_a = p.lse_a + place.of(p.lse_a_step0, p.lse_a_step1, p.lse_a_step2);
  const float* lse_b = p.lse_b + place.of(p.lse_b_step0, p.lse_b_step1, p.lse_b_step2);
  const float log_a = told(*lse_a), log_b = told(*lse_b);
  const A* from_a = p.a + place.of(p.a_step0, p.a_step1, p.a_step2);
  const B* from_b = p.b + place.of(p.b_step0, p.b_step1, p.b_step2);
  Values<A> a[kVectors];
  Values<B> b[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kLanes + lane) * kValues;
    if (column >= kDim) break;
    a[i].load(from_a + column);
    b[i].load(from_b + column);
  }
  const float larger = fmaxf(log_a, log_b), base = larger == -infinity() ? 0.f : larger;
  const float weight_a = expf(log_a - base), weight_b = expf(log_b - base), sum = weight_a + weight_b;
  const float share = 1.f / sum;
  __syncwarp();  // all of a row's threads have read what the first may write over
  if (lane == 0) p.lse[place.of(p.lse_step0, p.lse_step1, p.lse_step2)] = base + logf(sum);
  Out* to = p.out + place.of(p.out_step0, p.out_step1, p.out_step2);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kLanes + lane) * kValues;
    if (column >= kDim) break;
    Values<Out> out;
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) {
      // What has no weight has no keys, and may be anything.
      const float one = weight_a == 0.f ? 0.f : weight_a * share * float(a[i].values[j]);
      const float other = weight_b == 0.f ? 0.f : weight_b * share * float(b[i].values[j]);
      out.values[j] = Out(one + other);
    }
    out.store(to + column);
  }
}
