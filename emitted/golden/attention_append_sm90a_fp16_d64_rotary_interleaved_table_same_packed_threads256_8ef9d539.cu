// attention_append_sm90a_fp16_d64_rotary_interleaved_table_same_packed_threads256_8ef9d539
//
// New rows of k and v, fp16, 64 numbers each, written into caches of fp16.
//   Rows of k are turned by their positions, interleaved
//   4 threads of a warp share a row; a block has rows of one token
// Digest 8ef9d539b33e239d57a43498369d604b3bb1334ae35f715de367cc27a188aa5b; `warploom show` prints this file.
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

using Element = cutlass::half_t;
using Cached = cutlass::half_t;
constexpr int kThreads = 256, kDim = 64;
// A thread has kValues numbers from each half of a row, or of what is turned of it, or of the rest.
constexpr int kValues = 8, kParts = kDim / (2 * kValues), kLanes = 4;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cutlass::half_t* k_cache;  // [pages][kv_heads][page][dim]
  cutlass::half_t* v_cache;  // [pages][kv_heads][page][dim]
  const cutlass::half_t* k;  // [tokens][heads][dim]
  const cutlass::half_t* v;  // [tokens][heads][dim]
  const int* lengths;  // [batch]: rows of each sequence that are there; below 0: no sequence
  int* lengths_after;  // [batch]: rows that are there then; null: not asked for
  const int* cu_seqlens;  // [batch + 1]: where the new rows of each sequence begin
  const cutlass::half_t* cos;  // [positions][rotary / 2]
  const cutlass::half_t* sin;  // [positions][rotary / 2]
  int64_t k_head;  // elements of k from head to head
  int64_t k_token;  // elements of k from token to token
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
  int32_t positions;  // rows of cos and sin
  int32_t rotary;  // numbers of a row that are turned
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, k_cache) == 0 && OFFSET(Parameters, v_cache) == 8);
static_assert(OFFSET(Parameters, k) == 16 && OFFSET(Parameters, v) == 24);
static_assert(OFFSET(Parameters, lengths) == 32 && OFFSET(Parameters, lengths_after) == 40);
static_assert(OFFSET(Parameters, cu_seqlens) == 48 && OFFSET(Parameters, cos) == 56);
static_assert(OFFSET(Parameters, sin) == 64 && OFFSET(Parameters, k_head) == 72);
static_assert(OFFSET(Parameters, k_token) == 80 && OFFSET(Parameters, v_head) == 88);
static_assert(OFFSET(Parameters, v_token) == 96 && OFFSET(Parameters, k_cache_page) == 104);
static_assert(OFFSET(Parameters, k_cache_head) == 112 && OFFSET(Parameters, k_cache_row) == 120);
static_assert(OFFSET(Parameters, v_cache_page) == 128 && OFFSET(Parameters, v_cache_head) == 136);
static_assert(OFFSET(Parameters, v_cache_row) == 144 && OFFSET(Parameters, cos_step) == 152);
static_assert(OFFSET(Parameters, sin_step) == 160 && OFFSET(Parameters, batch) == 168);
static_assert(OFFSET(Parameters, kv_heads) == 172 && OFFSET(Parameters, blocks) == 176);
static_assert(OFFSET(Parameters, capacity) == 180 && OFFSET(Parameters, positions) == 184);
static_assert(OFFSET(Parameters, rotary) == 188);

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
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ void store(Element* to, const float (&x)[kValues]) {
  *reinterpret_cast<uint4*>(to) = {rounded(x[0], x[1]), rounded(x[2], x[3]), rounded(x[4], x[5]), rounded(x[6], x[7])};
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
  using Angle = cutlass::half_t;
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

// The last sequence whose rows begin at or before a token: each step of a warp leaves a 32nd of them.
__device__ __forceinline__ int sequence_of(const Parameters& p, int token) {
  int first = 0;
  for (int count = p.batch; count > 1;) {
    const int step = (count + 31) / 32, ahead = (threadIdx.x % 32 + 1) * step;
    const bool begun = ahead < count && p.cu_seqlens[first + ahead] <= token;
    const int passed = __popc(__ballot_sync(~0u, begun)) * step;
    first += passed;
    count = min(step, count - passed);
  }
  return first;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_append_sm90a_fp16_d64_rotary_interleaved_table_same_packed_threads256_8ef9d539(const __grid_constant__ Parameters p) {
  // Rows of a token: heads of k, of v, then of q.
  const int token = blockIdx.x / p.blocks, part = threadIdx.x % kLanes;
  const int row = blockIdx.x % p.blocks * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const bool query = row >= 2 * p.kv_heads, value = !query && row >= p.kv_heads;
  const int head = row - (query ? 2 * p.kv_heads : value ? p.kv_heads : 0);
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int64_t k_at = head * p.k_head + token * p.k_token, v_at = head * p.v_head + token * p.v_token;
  const bool there = part < kParts && !query;
  const Element* from = value ? p.v + v_at : p.k + k_at;
  // Of a row, the numbers that are turned come first; the others are taken in halves likewise.
  const int turned = value ? 0 : p.rotary, ends = 2 * kValues * part < turned ? turned : kDim - turned;
  const int first = kValues * part + (2 * kValues * part < turned ? 0 : turned / 2), second = first + ends / 2;
  Some<Element, kValues> some, others;  // what follows until they are read does not wait for them
  if (there) {
    some.load(from + first);
    others.load(from + second);
  }
  const int sequence = sequence_of(p, token), index = token - p.cu_seqlens[sequence];
  const bool inside = index >= 0 && token < p.cu_seqlens[sequence + 1];
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
      p.lengths_after[i] = length < 0 ? length : length + p.cu_seqlens[i + 1] - p.cu_seqlens[i];
    }
  }
  if (query || !there || !placed) return;
  const int64_t k_to = page * p.k_cache_page + head * p.k_cache_head + at * p.k_cache_row;
  const int64_t v_to = page * p.v_cache_page + head * p.v_cache_head + at * p.v_cache_row;
  Cached* to = value ? p.v_cache + v_to : p.k_cache + k_to;
  store(to + first, one);
  store(to + second, other);
}
