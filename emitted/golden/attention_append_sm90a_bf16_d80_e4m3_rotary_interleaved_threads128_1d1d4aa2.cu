// attention_append_sm90a_bf16_d80_e4m3_rotary_interleaved_threads128_1d1d4aa2
//
// New rows of k and v, bf16, 80 numbers each, written into caches of e4m3.
//   Rows of k are turned by their positions, interleaved
//   8 threads of a warp share a row; a block has rows of one token
// Digest 1d1d4aa2ab76b173a07bde67844a56d9292aa88abddcdaa00b3c5f77750e0d7a; `warploom show` prints this file.
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

using Element = cutlass::bfloat16_t;
using Cached = cutlass::float_e4m3_t;
constexpr int kThreads = 128, kDim = 80;
// A thread has kValues numbers from each half of a row, or of what is turned of it, or of the rest.
constexpr int kValues = 8, kParts = kDim / (2 * kValues), kLanes = 8;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cutlass::float_e4m3_t* k_cache;  // [pages][kv_heads][page][dim]
  cutlass::float_e4m3_t* v_cache;  // [pages][kv_heads][page][dim]
  const cutlass::bfloat16_t* k;  // [batch][heads][seq][dim]
  const cutlass::bfloat16_t* v;  // [batch][heads][seq][dim]
  const int* lengths;  // [batch]: rows of each sequence that are there; below 0: no sequence
  int* lengths_after;  // [batch]: rows that are there then; null: not asked for
  const float* cos;  // [positions][rotary / 2]
  const float* sin;  // [positions][rotary / 2]
  int64_t k_sequence;  // elements of k from sequence to sequence
  int64_t k_head;  // elements of k from head to head
  int64_t k_token;  // elements of k from token to token
  int64_t v_sequence;  // elements of v from sequence to sequence
  int64_t v_head;  // elements of v from head to head
  int64_t v_token;  // elements of v from token to token
  int64_t k_cache_page;  // elements of k_cache from page to page
  int64_t k_cache_head;  // elements of k_cache from head to head
  int64_t k_cache_row;  // elements of k_cache from row to row
  int64_t v_cache_page;  // elements of v_cache from page to page
  int64_t v_cache_head;  // elements of v_cache from head to head
  int64_t v_cache_row;  // elements of v_cache from row to row
  int64_t cos_step;  // elements from row to row of cos
  int64_t sin_step;  // elements from row to row of sin
  int32_t batch;  // sequences
  int32_t kv_heads;  // heads of k and v
  int32_t blocks;  // of one token
  int32_t capacity;  // rows that a sequence may have
  int32_t steps;  // tokens of a sequence, of k or of q
  int32_t seq;  // new rows of a sequence
  int32_t positions;  // rows of cos and sin
  int32_t rotary;  // numbers of a row that are turned
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, k_cache) == 0 && OFFSET(Parameters, v_cache) == 8);
static_assert(OFFSET(Parameters, k) == 16 && OFFSET(Parameters, v) == 24);
static_assert(OFFSET(Parameters, lengths) == 32 && OFFSET(Parameters, lengths_after) == 40);
static_assert(OFFSET(Parameters, cos) == 48 && OFFSET(Parameters, sin) == 56);
static_assert(OFFSET(Parameters, k_sequence) == 64 && OFFSET(Parameters, k_head) == 72);
static_assert(OFFSET(Parameters, k_token) == 80 && OFFSET(Parameters, v_sequence) == 88);
static_assert(OFFSET(Parameters, v_head) == 96 && OFFSET(Parameters, v_token) == 104);
static_assert(OFFSET(Parameters, k_cache_page) == 112 && OFFSET(Parameters, k_cache_head) == 120);
static_assert(OFFSET(Parameters, k_cache_row) == 128 && OFFSET(Parameters, v_cache_page) == 136);
static_assert(OFFSET(Parameters, v_cache_head) == 144 && OFFSET(Parameters, v_cache_row) == 152);
static_assert(OFFSET(Parameters, cos_step) == 160 && OFFSET(Parameters, sin_step) == 168);
static_assert(OFFSET(Parameters, batch) == 176 && OFFSET(Parameters, kv_heads) == 180);
static_assert(OFFSET(Parameters, blocks) == 184 && OFFSET(Parameters, capacity) == 188);
static_assert(OFFSET(Parameters, steps) == 192 && OFFSET(Parameters, seq) == 196);
static_assert(OFFSET(Parameters, positions) == 200 && OFFSET(Parameters, rotary) == 204);

// Some numbers in memory, which lie at a multiple of their bytes, or of 16.
template <class Kind, int kCount> union Some {
  using Word = cute::conditional_t<kCount * sizeof(Kind) % sizeof(uint4) == 0, uint4, uint2>;
  Word words[kCount * sizeof(Kind) / sizeof(Word)];
  Kind values[kCount];

  __device__ __forceinline__ Some() : words{} {}

  __device__ __forceinline__ void load(const Kind* from) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(words) / sizeof(Word)); ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }

  __device__ __forceinline__ void read(float (&to)[kValues], int first = 0) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) to[first + i] = float(values[i]);
  }
};

// Two numbers as one word.
__device__ __forceinline__ uint32_t rounded(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ void store(Element* to, const float (&x)[kValues]) {
  *reinterpret_cast<uint4*>(to) = {rounded(x[0], x[1]), rounded(x[2], x[3]), rounded(x[4], x[5]), rounded(x[6], x[7])};
}

// Four numbers as one word; what is too large becomes the largest.
__device__ __forceinline__ uint32_t coded(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(high) << 16 | low;
}

__device__ __forceinline__ void store(Cached* to, const float (&x)[kValues]) {
  *reinterpret_cast<uint2*>(to) = {coded(x[0], x[1], x[2], x[3]), coded(x[4], x[5], x[6], x[7])};
}

// A pair of numbers, turned. No step is contracted with the next: torch has the same bits.
__device__ __forceinline__ void turn(float& x, float& y, float cos, float sin) {
  const float turned = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
  y = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
  x = turned;
}

// All that a thread has of a row, turned; `part` counts the threads, from the first number on.
__device__ __forceinline__ void turn(const Parameters& p, int position, int part, float (&one)[kValues],
                                     float (&other)[kValues]) {
  using Angle = float;
  const int64_t at = min(max(position, 0), p.positions - 1);
  const Angle *to_cos = p.cos + at * p.cos_step, *to_sin = p.sin + at * p.sin_step;
  float cos[kValues], sin[kValues];
  constexpr int kPairs = kValues / 2;
  Some<Angle, kPairs> some_cos[2], some_sin[2];
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int pair = half * (p.rotary / 4) + part * kPairs;
    some_cos[half].load(to_cos + pair);
    some_sin[half].load(to_sin + pair);
  }
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    some_cos[half].read(cos, half * kPairs);
    some_sin[half].read(sin, half * kPairs);
  }
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    turn(one[2 * i], one[2 * i + 1], cos[i], sin[i]);
    turn(other[2 * i], other[2 * i + 1], cos[kPairs + i], sin[kPairs + i]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_append_sm90a_bf16_d80_e4m3_rotary_interleaved_threads128_1d1d4aa2(const __grid_constant__ Parameters p) {
  // Rows of a token: heads of k, of v, then of q.
  const int token = blockIdx.x / p.blocks, part = threadIdx.x % kLanes;
  const int row = blockIdx.x % p.blocks * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const bool query = row >= 2 * p.kv_heads, value = !query && row >= p.kv_heads;
  const int head = row - (query ? 2 * p.kv_heads : value ? p.kv_heads : 0);
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int sequence = token / p.steps, index = token % p.steps;
  const bool inside = index < p.seq;
  const int64_t k_at = sequence * p.k_sequence + head * p.k_head + index * p.k_token;
  const int64_t v_at = sequence * p.v_sequence + head * p.v_head + index * p.v_token;
  const bool there = part < kParts && !query && inside;
  const Element* from = value ? p.v + v_at : p.k + k_at;
  // Of a row, the numbers that are turned come first; the others are taken in halves likewise.
  const int turned = value ? 0 : p.rotary, ends = 2 * kValues * part < turned ? turned : kDim - turned;
  const int first = kValues * part + (2 * kValues * part < turned ? 0 : turned / 2), second = first + ends / 2;
  Some<Element, kValues> some, others;  // what follows until they are read does not wait for them
  if (there) {
    some.load(from + first);
    others.load(from + second);
  }
  const int length = p.lengths[sequence];
  const int64_t position = int64_t(length) + index;
  // A row has no place where its sequence counts for nothing, or where it is full.
  bool placed = inside && length >= 0 && position < p.capacity;
  const int64_t page = sequence, at = position;
  float one[kValues], other[kValues];
  some.read(one);
  others.read(other);
  if (there && 2 * kValues * part < turned)
    turn(p, position < p.positions ? int(position) : p.positions, part, one, other);
  if (blockIdx.x == 0 && p.lengths_after != nullptr) {
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) {
      const int length = p.lengths[i];
      p.lengths_after[i] = length < 0 ? length : length + p.seq;
    }
  }
  if (query || !there || !placed) return;
  const int64_t k_to = page * p.k_cache_page + head * p.k_cache_head + at * p.k_cache_row;
  const int64_t v_to = page * p.v_cache_page + head * p.v_cache_head + at * p.v_cache_row;
  Cached* to = value ? p.v_cache + v_to : p.k_cache + k_to;
  store(to + first, one);
  store(to + second, other);
}
