// attention_append_sm90a_bf16_d96_e4m3_scales_token_rotary_halves_table_same_queries_packed_paged_threads128_26859741
//
// New rows of k and v, bf16, 96 numbers each, written into caches of e4m3 in pages.
//   Rows of k and q are turned by their positions, halves
//   What is cached is divided by a scale of its row, which is written beside it
// Digest 26859741907d3abb0222f3d7efb33b11db37f2090187b2d0423e59f351f6e418; `warploom show` prints this file.
//
// Launch: 128 threads; grid: CTAs of 16 rows of one token, heads of k, of v, then of q
// 8 threads of a warp share a row, and each has 8 numbers from each half of it.
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

using Element = cutlass::bfloat16_t;
using Cached = cutlass::float_e4m3_t;
constexpr int kThreads = 128, kDim = 96;
// A thread has kValues numbers from each half of a row, or of what is turned of it, or of the rest.
constexpr int kValues = 8, kParts = kDim / (2 * kValues), kLanes = 8;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cutlass::float_e4m3_t* k_cache;  // [pages][kv_heads][page][dim]
  cutlass::float_e4m3_t* v_cache;  // [pages][kv_heads][page][dim]
  const cutlass::bfloat16_t* k;  // [tokens][heads][dim]
  const cutlass::bfloat16_t* v;  // [tokens][heads][dim]
  const int* lengths;  // [batch]: rows of each sequence that are there; below 0: no sequence
  int* lengths_after;  // [batch]: rows that are there then; null: not asked for
  const int* page_table;  // [batch][columns]
  const int* cu_seqlens;  // [batch + 1]: where the new rows of each sequence begin
  const cutlass::bfloat16_t* cos;  // [positions][rotary / 2]
  const cutlass::bfloat16_t* sin;  // [positions][rotary / 2]
  const cutlass::bfloat16_t* q;  // [tokens][heads][dim]
  cutlass::bfloat16_t* out;  // [tokens][heads][dim]: q, turned
  float* scale_k;  // [pages][kv_heads][page]
  float* scale_v;  // [pages][kv_heads][page]
  int64_t k_head;  // elements of k from head to head
  int64_t k_token;  // elements of k from token to token
  int64_t v_head;  // elements of v from head to head
  int64_t v_token;  // elements of v from token to token
  int64_t q_head;  // elements of q from head to head
  int64_t q_token;  // elements of q from token to token
  int64_t out_head;  // elements of out from head to head
  int64_t out_token;  // elements of out from token to token
  int64_t k_cache_page;  // elements of k_cache from page to page
  int64_t k_cache_head;  // elements of k_cache from head to head
  int64_t k_cache_row;  // elements of k_cache from row to row
  int64_t v_cache_page;  // elements of v_cache from page to page
  int64_t v_cache_head;  // elements of v_cache from head to head
  int64_t v_cache_row;  // elements of v_cache from row to row
  int64_t scale_k_page;  // elements of scale_k from page to page
  int64_t scale_k_head;  // elements of scale_k from head to head
  int64_t scale_k_row;  // elements of scale_k from row to row
  int64_t scale_v_page;  // elements of scale_v from page to page
  int64_t scale_v_head;  // elements of scale_v from head to head
  int64_t scale_v_row;  // elements of scale_v from row to row
  int64_t cos_step;  // elements from row to row of cos
  int64_t sin_step;  // elements from row to row of sin
  int64_t table_step;  // entries of the table from sequence to sequence
  int32_t batch;  // sequences
  int32_t kv_heads;  // heads of k and v
  int32_t blocks;  // of one token
  int32_t capacity;  // rows that a sequence may have
  int32_t heads;  // of q
  int32_t pages;  // of each cache
  int32_t page;  // rows of a page
  int32_t positions;  // rows of cos and sin
  int32_t rotary;  // numbers of a row that are turned
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, k_cache) == 0 && OFFSET(Parameters, v_cache) == 8);
static_assert(OFFSET(Parameters, k) == 16 && OFFSET(Parameters, v) == 24);
static_assert(OFFSET(Parameters, lengths) == 32 && OFFSET(Parameters, lengths_after) == 40);
static_assert(OFFSET(Parameters, page_table) == 48 && OFFSET(Parameters, cu_seqlens) == 56);
static_assert(OFFSET(Parameters, cos) == 64 && OFFSET(Parameters, sin) == 72);
static_assert(OFFSET(Parameters, q) == 80 && OFFSET(Parameters, out) == 88);
static_assert(OFFSET(Parameters, scale_k) == 96 && OFFSET(Parameters, scale_v) == 104);
static_assert(OFFSET(Parameters, k_head) == 112 && OFFSET(Parameters, k_token) == 120);
static_assert(OFFSET(Parameters, v_head) == 128 && OFFSET(Parameters, v_token) == 136);
static_assert(OFFSET(Parameters, q_head) == 144 && OFFSET(Parameters, q_token) == 152);
static_assert(OFFSET(Parameters, out_head) == 160 && OFFSET(Parameters, out_token) == 168);
static_assert(OFFSET(Parameters, k_cache_page) == 176 && OFFSET(Parameters, k_cache_head) == 184);
static_assert(OFFSET(Parameters, k_cache_row) == 192 && OFFSET(Parameters, v_cache_page) == 200);
static_assert(OFFSET(Parameters, v_cache_head) == 208 && OFFSET(Parameters, v_cache_row) == 216);
static_assert(OFFSET(Parameters, scale_k_page) == 224 && OFFSET(Parameters, scale_k_head) == 232);
static_assert(OFFSET(Parameters, scale_k_row) == 240 && OFFSET(Parameters, scale_v_page) == 248);
static_assert(OFFSET(Parameters, scale_v_head) == 256 && OFFSET(Parameters, scale_v_row) == 264);
static_assert(OFFSET(Parameters, cos_step) == 272 && OFFSET(Parameters, sin_step) == 280);
static_assert(OFFSET(Parameters, table_step) == 288 && OFFSET(Parameters, batch) == 296);
static_assert(OFFSET(Parameters, kv_heads) == 300 && OFFSET(Parameters, blocks) == 304);
static_assert(OFFSET(Parameters, capacity) == 308 && OFFSET(Parameters, heads) == 312);
static_assert(OFFSET(Parameters, pages) == 316 && OFFSET(Parameters, page) == 320);
static_assert(OFFSET(Parameters, positions) == 324 && OFFSET(Parameters, rotary) == 328);

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
  using Angle = cutlass::bfloat16_t;
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
    attention_append_sm90a_bf16_d96_e4m3_scales_token_rotary_halves_table_same_queries_packed_paged_threads128_26859741(const __grid_constant__ Parameters p) {
  // Rows of a token: heads of k, of v, then of q.
  const int token = blockIdx.x / p.blocks, part = threadIdx.x % kLanes;
  const int row = blockIdx.x % p.blocks * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const bool query = row >= 2 * p.kv_heads, value = !query && row >= p.kv_heads;
  const int head = row - (query ? 2 * p.kv_heads : value ? p.kv_heads : 0);
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int64_t k_at = head * p.k_head + token * p.k_token, v_at = head * p.v_head + token * p.v_token;
  const int64_t q_at = head * p.q_head + token * p.q_token, out_at = head * p.out_head + token * p.out_token;
  const bool there = part < kParts && (!query || head < p.heads);
  const Element* from = query ? p.q + q_at : value ? p.v + v_at : p.k + k_at;
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
  float largest = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) largest = fmaxf(largest, fmaxf(fabsf(one[i]), fabsf(other[i])));
  CUTE_UNROLL
  for (int step = kLanes / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (blockIdx.x == 0 && p.lengths_after != nullptr) {
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) {
      const int length = p.lengths[i];
      p.lengths_after[i] = length < 0 ? length : length + p.cu_seqlens[i + 1] - p.cu_seqlens[i];
    }
  }
  if (query || !there || !placed) return;
  // Of nothing but zeros too there is a scale, and of infinity a finite one.
  const float scale = fminf(fmaxf(largest, 0x1p-100f), 0x1.fffffep127f) / 448.f;
  if (part == 0) {
    if (value) p.scale_v[page * p.scale_v_page + head * p.scale_v_head + at * p.scale_v_row] = scale;
    else p.scale_k[page * p.scale_k_page + head * p.scale_k_head + at * p.scale_k_row] = scale;
  }
  const float inverse = 1.f / scale;
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) {
    one[i] = __fmul_rn(one[i], inverse);
    other[i] = __fmul_rn(other[i], inverse);
  }
  const int64_t k_to = page * p.k_cache_page + head * p.k_cache_head + at * p.k_cache_row;
  const int64_t v_to = page * p.v_cache_page + head * p.v_cache_head + at * p.v_cache_row;
  Cached* to = value ? p.v_cache + v_to : p.k_cache + k_to;
  store(to + first, one);
  store(to + second, other);
}
