// combine_sm90a_bf16_permute_weights_fp32_dot_256_8f54fded
//
// Copies each token to the rows of the experts that it chose:
//   rows[inverse[t][j]] = weights[t][j] * tokens[t]
//   gradient[t][j] = dot(combined[inverse[t][j]], tokens[t]), in fp32; 0 where a pair has no row
// A pair without a row (-1) is left out, and rows past the last offset are set to zeros.
// A warp copies a row.
//   tokens and rows bf16, weights fp32
// Digest 8f54fded34cb6ff14d80840898cd722bd43e0c0e897cf5fd026d950bb4a0bc3b; `warploom show` prints this file.
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

using Value = cutlass::bfloat16_t;
using Weight = float;
// A thread loads kValues values at once, and has kLoads such loads in flight.
constexpr int kThreads = 256, kValues = 8, kLoads = 4;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* tokens;  // [count][tokens_pitch]
  cutlass::bfloat16_t* rows;  // [row_count][rows_pitch]
  const int32_t* inverse;  // [count][choices]: the row of each pair, or -1
  const float* weights;  // [count][choices], by these steps
  const int32_t* offsets;  // [experts]: the last ends the rows that have a token
  const cutlass::bfloat16_t* combined;  // [row_count][combined_pitch]: rows, as weighted
  float* gradient;  // [count][choices]: of weights
  int64_t tokens_pitch;  // elements between tokens
  int64_t rows_pitch;  // elements between rows
  int64_t weights_token;  // elements to the next token
  int64_t weights_choice;  // to the next choice
  int64_t combined_pitch;  // between them
  int32_t count;  // of tokens
  int32_t choices;  // rows of a token: k
  int32_t columns;  // of a token, in eights
  int32_t row_count;  // of all experts
  int32_t experts;  // in offsets; 0 where there are none
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, tokens) == 0 && OFFSET(Parameters, rows) == 8);
static_assert(OFFSET(Parameters, inverse) == 16 && OFFSET(Parameters, weights) == 24);
static_assert(OFFSET(Parameters, offsets) == 32 && OFFSET(Parameters, combined) == 40);
static_assert(OFFSET(Parameters, gradient) == 48 && OFFSET(Parameters, tokens_pitch) == 56);
static_assert(OFFSET(Parameters, rows_pitch) == 64 && OFFSET(Parameters, weights_token) == 72);
static_assert(OFFSET(Parameters, weights_choice) == 80 && OFFSET(Parameters, combined_pitch) == 88);
static_assert(OFFSET(Parameters, count) == 96 && OFFSET(Parameters, choices) == 100);
static_assert(OFFSET(Parameters, columns) == 104 && OFFSET(Parameters, row_count) == 108);
static_assert(OFFSET(Parameters, experts) == 112);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// kValues adjacent values of a row, at a multiple of 16 bytes.
union Values {
  uint4 words[kValues * sizeof(Value) / sizeof(uint4)];
  Value values[kValues];

  __device__ __forceinline__ Values() {}

  __device__ __forceinline__ void load(const Value* from) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }

  __device__ __forceinline__ void store(Value* to) const {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(words) / sizeof(uint4)); ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
};

__device__ __forceinline__ float weight_of(const Parameters& p, int token, int choice) {
  return float(p.weights[token * p.weights_token + choice * p.weights_choice]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    combine_sm90a_bf16_permute_weights_fp32_dot_256_8f54fded(const __grid_constant__ Parameters p) {
  constexpr int kWarps = kThreads / 32, kStep = 32 * kValues;  // columns of a warp
  const int pair = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pairs = p.count * p.choices;
  wait_for_previous_grid();
  if (pair < pairs) {
    const int row = p.inverse[pair], token = pair / p.choices;
    float dot = 0.f;
    if (row >= 0 && row < p.row_count) {
      const Value* const from = p.tokens + token * p.tokens_pitch;
      Value* const to = p.rows + row * p.rows_pitch;
      const float weight = weight_of(p, token, pair - token * p.choices);
      const Value* const combined = p.combined + row * p.combined_pitch;
      for (int first = lane * kValues; first < p.columns; first += kLoads * kStep) {
        Values values[kLoads];
        Values others[kLoads];
        CUTE_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          const int column = first + i * kStep;
          if (column >= p.columns) break;
          values[i].load(from + column);
          others[i].load(combined + column);
        }
        CUTE_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          const int column = first + i * kStep;
          if (column >= p.columns) break;
          CUTE_UNROLL
          for (int j = 0; j < kValues; ++j) {
            const float value = float(values[i].values[j]);
            dot = fmaf(value, float(others[i].values[j]), dot);
            values[i].values[j] = Value(weight * value);
          }
          values[i].store(to + column);
        }
      }
    }
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    if (lane == 0) p.gradient[pair] = Weight(dot);
  }
  if (p.experts == 0) return;
  // Rows past the last offset belong to no pair: zeros, so that code that reads the whole tensor finds no NaN.
  const int end = max(p.offsets[p.experts - 1], 0), step = int(gridDim.x) * kWarps;
  Values zeros;
  CUTE_UNROLL
  for (int j = 0; j < kValues; ++j) zeros.values[j] = Value(0.f);
  for (int row = min(end, p.row_count) + pair; row < p.row_count; row += step) {
    Value* const to = p.rows + row * p.rows_pitch;
    for (int column = lane * kValues; column < p.columns; column += kStep) zeros.store(to + column);
  }
}
