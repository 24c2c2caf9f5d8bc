// attention_append_sm90a_fp16_d256_int8_scales_head_paged_threads512_bcd5ebf8
//
// New rows of k and v, fp16, 256 numbers each, written into caches of int8 in pages.
//   What is cached is divided by a scale that is given
// Digest bcd5ebf8e66daadc83e2e3be5392aadab3d7442e9f11d2f36708db41d47e2dcf; `warploom show` prints this file.
//
// Launch: 512 threads; grid: CTAs of 32 rows of one token, heads of k, of v
// 16 threads of a warp share a row, and each has 8 numbers from each half of it.
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

using Element = cutlass::half_t;
using Cached = int8_t;
constexpr int kThreads = 512, kDim = 256;
// A thread has kValues numbers from each half of a row, or of what is turned of it, or of the rest.
constexpr int kValues = 8, kParts = kDim / (2 * kValues), kLanes = 16;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  int8_t* k_cache;  // [pages][kv_heads][page][dim]
  int8_t* v_cache;  // [pages][kv_heads][page][dim]
  const cutlass::half_t* k;  // [batch][heads][seq][dim]
  const cutlass::half_t* v;  // [batch][heads][seq][dim]
  const int* lengths;  // [batch]: rows of each sequence that are there; below 0: no sequence
  int* lengths_after;  // [batch]: rows that are there then; null: not asked for
  const int* page_table;  // [batch][columns]
  const float* scale_k;  // [kv_heads]
  const float* scale_v;  // [kv_heads]
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
  int64_t table_step;  // entries of the table from sequence to sequence
  int32_t batch;  // sequences
  int32_t kv_heads;  // heads of k and v
  int32_t blocks;  // of one token
  int32_t capacity;  // rows that a sequence may have
  int32_t steps;  // tokens of a sequence, of k or of q
  int32_t seq;  // new rows of a sequence
  int32_t pages;  // of each cache
  int32_t page;  // rows of a page
  int32_t head_step;  // elements from the scale of a head to the next
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, k_cache) == 0 && OFFSET(Parameters, v_cache) == 8);
static_assert(OFFSET(Parameters, k) == 16 && OFFSET(Parameters, v) == 24);
static_assert(OFFSET(Parameters, lengths) == 32 && OFFSET(Parameters, lengths_after) == 40);
static_assert(OFFSET(Parameters, page_table) == 48 && OFFSET(Parameters, scale_k) == 56);
static_assert(OFFSET(Parameters, scale_v) == 64 && OFFSET(Parameters, k_sequence) == 72);
static_assert(OFFSET(Parameters, k_head) == 80 && OFFSET(Parameters, k_token) == 88);
static_assert(OFFSET(Parameters, v_sequence) == 96 && OFFSET(Parameters, v_head) == 104);
static_assert(OFFSET(Parameters, v_token) == 112 && OFFSET(Parameters, k_cache_page) == 120);
static_assert(OFFSET(Parameters, k_cache_head) == 128 && OFFSET(Parameters, k_cache_row) == 136);
static_assert(OFFSET(Parameters, v_cache_page) == 144 && OFFSET(Parameters, v_cache_head) == 152);
static_assert(OFFSET(Parameters, v_cache_row) == 160 && OFFSET(Parameters, table_step) == 168);
static_assert(OFFSET(Parameters, batch) == 176 && OFFSET(Parameters, kv_heads) == 180);
static_assert(OFFSET(Parameters, blocks) == 184 && OFFSET(Parameters, capacity) == 188);
static_assert(OFFSET(Parameters, steps) == 192 && OFFSET(Parameters, seq) == 196);
static_assert(OFFSET(Parameters, pages) == 200 && OFFSET(Parameters, page) == 204);
static_assert(OFFSET(Parameters, head_step) == 208);

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

__device__ __forceinline__ uint32_t whole(float x) {
  int32_t code;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(x));
  return code & 0xff;
}

// Four numbers as one word; what is too large becomes the largest.
__device__ __forceinline__ uint32_t coded(float a, float b, float c, float d) {
  return whole(a) | whole(b) << 8 | whole(c) << 16 | whole(d) << 24;
}

__device__ __forceinline__ void store(Cached* to, const float (&x)[kValues]) {
  *reinterpret_cast<uint2*>(to) = {coded(x[0], x[1], x[2], x[3]), coded(x[4], x[5], x[6], x[7])};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_append_sm90a_fp16_d256_int8_scales_head_paged_threads512_bcd5ebf8(const __grid_constant__ Parameters p) {
  // Rows of a token: heads of k, of v, then of q.
  const int token = blockIdx.x / p.blocks, part = threadIdx.x % kLanes;
  const int row = blockIdx.x % p.blocks * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const bool query = row >= 2 * p.kv_heads, value = !query && row >= p.kv_heads;
  const int head = row - (query ? 2 * p.kv_heads : value ? p.kv_heads : 0);
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int sequence = token / p.steps, index = token % p.steps;
  const bool inside = index < p.seq;
  const int64_t k_at = sequence * p.k_sequence + head * p.k_head + index * p.k_token;
  const int64_t v_at = sequence * p.v_sequence + head * p.v_head + index * p.v_token;
  const bool there = part < kParts && !query && inside;
  const Element* from = value ? p.v + v_at : p.k + k_at;
  // Of a row, the numbers that are turned come first; the others are taken in halves likewise.
  const int first = kValues * part, second = first + kDim / 2;
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
  if (blockIdx.x == 0 && p.lengths_after != nullptr) {
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) {
      const int length = p.lengths[i];
      p.lengths_after[i] = length < 0 ? length : length + p.seq;
    }
  }
  if (query || !there || !placed) return;
  const float scale = (value ? p.scale_v : p.scale_k)[head * p.head_step];
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
