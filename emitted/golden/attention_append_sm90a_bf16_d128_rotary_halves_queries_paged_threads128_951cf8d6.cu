// attention_append_sm90a_bf16_d128_rotary_halves_queries_paged_threads128_951cf8d6
//
// New rows of k and v, bf16, 128 numbers each, written into caches of bf16 in pages.
//   Rows of k and q are turned by their positions, halves
//   8 threads of a warp share a row; a block has rows of one token
// Digest 951cf8d617374a116c2e2bbdf7a430c1ebc38179aab56df148f3abaf83e58e8b; `warploom show` prints this file.
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
using Cached = cutlass::bfloat16_t;
constexpr int kThreads = 128, kDim = 128;
// A thread has kValues numbers from each half of a row, or of what is turned of it, or of the rest.
constexpr int kValues = 8, kParts = kDim / (2 * kValues), kLanes = 8;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cutlass::bfloat16_t* k_cache;  // [pages][kv_heads][page][dim]
  cutlass::bfloat16_t* v_cache;  // [pages][kv_heads][page][dim]
  const cutlass::bfloat16_t* k;  // [batch][heads][seq][dim]
  const cutlass::bfloat16_t* v;  // [batch][heads][seq][dim]
  const int* lengths;  // [batch]: rows of each sequence that are there; below 0: no sequence
  int* lengths_after;  // [batch]: rows that are there then; null: not asked for
  const int* page_table;  // [batch][columns]
  const float* cos;  // [positions][rotary / 2]
  const float* sin;  // [positions][rotary / 2]
  const cutlass::bfloat16_t* q;  // [batch][heads][seq][dim]
  cutlass::bfloat16_t* out;  // [batch][heads][seq][dim]: q, turned
  int64_t k_sequence;  // elements of k from sequence to sequence
  int64_t k_head;  // elements of k from head to head
  int64_t k_token;  // elements of k from token to token
  int64_t v_sequence;  // elements of v from sequence to sequence
  int64_t v_head;  // elements of v from head to head
  int64_t v_token;  // elements of v from token to token
  int64_t q_sequence;  // elements of q from sequence to sequence
  int64_t q_head;  // elements of q from head to head
  int64_t q_token;  // elements of q from token to token
  int64_t out_sequence;  // elements of out from sequence to sequence
  int64_t out_head;  // elements of out from head to head
  int64_t out_token;  // elements of out from token to token
  int64_t k_cache_page;  // elements of k_cache from page to page
  int64_t k_cache_head;  // elements of k_cache from head to head
  int64_t k_cache_row;  // elements of k_cache from row to row
  int64_t v_cache_page;  // elements of v_cache from page to page
  int64_t v_cache_head;  // elements of v_cache from head to head
  int64_t v_cache_row;  // elements of v_cache from row to row
  int64_t cos_step;  // elements from row to row of cos
  int64_t sin_step;  // elements from row to row of sin
  int64_t table_step;  // entries of the table from sequence to sequence
  int32_t batch;  // sequences
  int32_t kv_heads;  // heads of k and v
  int32_t blocks;  // of one token
  int32_t capacity;  // rows that a sequence may have
  int32_t heads;  // of q
  int32_t steps;  // tokens of a sequence, of k or of q
  int32_t seq;  // new rows of a sequence
  int32_t seq_q;  // rows of q of a sequence
  int32_t pages;  // of each cache
  int32_t page;  // rows of a page
  int32_t positions;  // rows of cos and sin
  int32_t rotary;  // numbers of a row that are turned
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, k_cache) == 0 && OFFSET(Parameters, v_cache) == 8);
static_assert(OFFSET(Parameters, k) == 16 && OFFSET(Parameters, v) == 24);
static_assert(OFFSET(Parameters, lengths) == 32 && OFFSET(Parameters, lengths_after) == 40);
static_assert(OFFSET(Parameters, page_table) == 48 && OFFSET(Parameters, cos) == 56);
static_assert(OFFSET(Parameters, sin) == 64 && OFFSET(Parameters, q) == 72);
static_assert(OFFSET(Parameters, out) == 80 && OFFSET(Parameters, k_sequence) == 88);
static_assert(OFFSET(Parameters, k_head) == 96 && OFFSET(Parameters, k_token) == 104);
static_assert(OFFSET(Parameters, v_sequence) == 112 && OFFSET(Parameters, v_head) == 120);
static_assert(OFFSET(Parameters, v_token) == 128 && OFFSET(Parameters, q_sequence) == 136);
static_assert(OFFSET(Parameters, q_head) == 144 && OFFSET(Parameters, q_token) == 152);
static_assert(OFFSET(Parameters, out_sequence) == 160 && OFFSET(Parameters, out_head) == 168);
static_assert(OFFSET(Parameters, out_token) == 176 && OFFSET(Parameters, k_cache_page) == 184);
static_assert(OFFSET(Parameters, k_cache_head) == 192 && OFFSET(Parameters, k_cache_row) == 200);
static_assert(OFFSET(Parameters, v_cache_page) == 208 && OFFSET(Parameters, v_cache_head) == 216);
static_assert(OFFSET(Parameters, v_cache_row) == 224 && OFFSET(Parameters, cos_step) == 232);
static_assert(OFFSET(Parameters, sin_step) == 240 && OFFSET(Parameters, table_step) == 248);
static_assert(OFFSET(Parameters, batch) == 256 && OFFSET(Parameters, kv_heads) == 260);
static_assert(OFFSET(Parameters, blocks) == 264 && OFFSET(Parameters, capacity) == 268);
static_assert(OFFSET(Parameters, heads) == 272 && OFFSET(Parameters, steps) == 276);
static_assert(OFFSET(Parameters, seq) == 280 && OFFSET(Parameters, seq_q) == 284);
static_assert(OFFSET(Parameters, pages) == 288 && OFFSET(Parameters, page) == 292);
static_assert(OFFSET(Parameters, positions) == 296 && OFFSET(Parameters, rotary) == 300);

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
  Some<Angle, kValues> some_cos, some_sin;
  some_cos.load(to_cos + part * kValues);
  some_sin.load(to_sin + part * kValues);
  some_cos.read(cos);
  some_sin.read(sin);
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) turn(one[i], other[i], cos[i], sin[i]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_append_sm90a_bf16_d128_rotary_halves_queries_paged_threads128_951cf8d6(const __grid_constant__ Parameters p) {
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
  const int64_t q_at = sequence * p.q_sequence + head * p.q_head + index * p.q_token;
  const int64_t out_at = sequence * p.out_sequence + head * p.out_head + index * p.out_token;
  const bool there = part < kParts && (query ? head < p.heads && index < p.seq_q : inside);
  const Element* from = query ? p.q + q_at : value ? p.v + v_at : p.k + k_at;
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
  const int column = placed ? uint32_t(position) / uint32_t(p.page) : 0;
  const int64_t page = placed ? p.page_table[sequence * p.table_step + column] : -1;
  const int64_t at = int(position) - column * p.page;
  placed = placed && page >= 0 && page < p.pages;
  float one[kValues], other[kValues];
  some.read(one);
  others.read(other);
  if (there && 2 * kValues * part < turned)
    turn(p, position < p.positions ? int(position) : p.positions, part, one, other);
  if (query && there) {
    store(p.out + out_at + first, one);
    store(p.out + out_at + second, other);
  }
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
