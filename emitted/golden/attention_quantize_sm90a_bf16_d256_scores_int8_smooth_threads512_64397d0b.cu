// attention_quantize_sm90a_bf16_d256_scores_int8_smooth_threads512_64397d0b
//
// q, k and v of attention bf16, rows of 256: q and k to int8 with scales of rows of q and of 128 keys, k less its mean;
//   v to e4m3 with a scale of each head, transposed: [dim][keys]
// In each 16 keys of the transposed v, slot 4 t + u has key u / 2 * 8 + 2 t + u % 2, so that accumulators of scores are
// operands of the product with v as they are.
// Digest 64397d0b34386a1f20ce1ebc4de3d06c5eaa2980710e6446978fc64358867a5a; `warploom show` prints this file.
//
// Two kernels, in the order of launch, of 512 threads a CTA:
//   statistics  a CTA per 256 keys of a head: the mean of k, the largest magnitude of v
//   main        a CTA per 128 rows of a head: of k and v in turns, then of q
// 16 threads of a warp share a row, 16 values each; registers as the compiler allots them.
// Shared memory, static: 32896 bytes, the codes of 128 rows of v on their way to the transpose
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
constexpr int kThreads = 512, kDim = 256;
// A CTA has kTile rows of a head; a thread quantizes kValues values of a row at once. kLanes threads share a row, of
// which kParts have values. A CTA has kRows rows at once.
constexpr int kTile = 128, kValues = 16, kLanes = 16, kParts = kDim / kValues;
constexpr int kRows = kThreads / kLanes, kVectors = kTile / kRows;
static_assert(kVectors * kRows == kTile && kDim % kValues == 0);

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* v;  // [batch][kv_heads][seq_k][dim]
  uint8_t* v_out;  // [batch][kv_heads][dim][tiles_k * 128]: v in e4m3, transposed
  float* v_descale;  // [batch][kv_heads]
  float* v_factor;  // [batch][kv_heads]: what v is multiplied by
  float* partial_peaks;  // [batch][kv_heads][chunks]: largest magnitudes of v
  unsigned* arrivals;  // [batch][kv_heads]: chunks done; left as zeros
  const cutlass::bfloat16_t* q;  // [batch][heads][seq_q][dim]
  const cutlass::bfloat16_t* k;  // [batch][kv_heads][seq_k][dim]
  uint8_t* q_out;  // [batch][heads][seq_q][dim]: q in 8 bits
  uint8_t* k_out;  // [batch][kv_heads][seq_k][dim]: k in 8 bits
  float* q_descale;  // [batch][heads][seq_q]
  float* k_descale;  // [batch][kv_heads][tiles_k]
  float* partial_sums;  // [batch][kv_heads][chunks][dim]: of k
  float* k_mean;  // [batch][kv_heads][dim]
  float* score_shift;  // [batch][heads][seq_q]: products of rows of q and the mean
  int64_t v_batch;  // elements of v from batch to batch
  int64_t v_head;  // elements of v from head to head
  int64_t v_row;  // elements of v from row to row
  int64_t q_batch;  // elements of q from batch to batch
  int64_t q_head;  // elements of q from head to head
  int64_t q_row;  // elements of q from row to row
  int64_t k_batch;  // elements of k from batch to batch
  int64_t k_head;  // elements of k from head to head
  int64_t k_row;  // elements of k from row to row
  int64_t q_out_batch;  // elements of q_out from batch to batch
  int64_t q_out_head;  // elements of q_out from head to head
  int64_t q_out_row;  // elements of q_out from row to row
  int64_t k_out_batch;  // elements of k_out from batch to batch
  int64_t k_out_head;  // elements of k_out from head to head
  int64_t k_out_row;  // elements of k_out from row to row
  int32_t kv_heads;  // heads of k and v
  int32_t seq_k;  // keys of a batch
  int32_t tiles_k;  // tiles of keys, of one head
  int32_t chunks;  // of keys, of one head
  int32_t key_tiles;  // CTAs that have keys
  int32_t heads;  // of q
  int32_t seq_q;  // rows of q of a batch
  int32_t tiles_q;  // tiles of rows of q, of one head
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, v) == 0 && OFFSET(Parameters, v_out) == 8);
static_assert(OFFSET(Parameters, v_descale) == 16 && OFFSET(Parameters, v_factor) == 24);
static_assert(OFFSET(Parameters, partial_peaks) == 32 && OFFSET(Parameters, arrivals) == 40);
static_assert(OFFSET(Parameters, q) == 48 && OFFSET(Parameters, k) == 56);
static_assert(OFFSET(Parameters, q_out) == 64 && OFFSET(Parameters, k_out) == 72);
static_assert(OFFSET(Parameters, q_descale) == 80 && OFFSET(Parameters, k_descale) == 88);
static_assert(OFFSET(Parameters, partial_sums) == 96 && OFFSET(Parameters, k_mean) == 104);
static_assert(OFFSET(Parameters, score_shift) == 112 && OFFSET(Parameters, v_batch) == 120);
static_assert(OFFSET(Parameters, v_head) == 128 && OFFSET(Parameters, v_row) == 136);
static_assert(OFFSET(Parameters, q_batch) == 144 && OFFSET(Parameters, q_head) == 152);
static_assert(OFFSET(Parameters, q_row) == 160 && OFFSET(Parameters, k_batch) == 168);
static_assert(OFFSET(Parameters, k_head) == 176 && OFFSET(Parameters, k_row) == 184);
static_assert(OFFSET(Parameters, q_out_batch) == 192 && OFFSET(Parameters, q_out_head) == 200);
static_assert(OFFSET(Parameters, q_out_row) == 208 && OFFSET(Parameters, k_out_batch) == 216);
static_assert(OFFSET(Parameters, k_out_head) == 224 && OFFSET(Parameters, k_out_row) == 232);
static_assert(OFFSET(Parameters, kv_heads) == 240 && OFFSET(Parameters, seq_k) == 244);
static_assert(OFFSET(Parameters, tiles_k) == 248 && OFFSET(Parameters, chunks) == 252);
static_assert(OFFSET(Parameters, key_tiles) == 256 && OFFSET(Parameters, heads) == 260);
static_assert(OFFSET(Parameters, seq_q) == 264 && OFFSET(Parameters, tiles_q) == 268);

// A tile (or chunk) of rows of a head; heads of the same rows come after each other, as they are in memory.
struct TileCoord {
  int batch, tile, head;

  __device__ __forceinline__ TileCoord(int index, int heads, int tiles)
      : batch(index / heads / tiles), tile(index / heads % tiles), head(index % heads) {}
  // The head's index in all batches.
  __device__ __forceinline__ int64_t group(int heads) const { return int64_t(batch) * heads + head; }
};

// Values of a row that follow each other; zeros where there is no row.
struct Vector {
  static constexpr int kWords = kValues * sizeof(Element) / sizeof(uint4);
  union {
    uint4 words[kWords];
    Element values[kValues];
  };

  __device__ __forceinline__ Vector() {}
  __device__ __forceinline__ void load(const Element* from, bool there) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i)
      words[i] = there ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
  }
};

// ---- Scales, and values in 8 bits ---------------------------------------------------------------------
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// The larger one; NaN wins over every number.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// That of threads whose numbers differ in the lowest bits, of so many threads; all of the warp take part.
template <int kWidth> __device__ __forceinline__ float largest(float value) {
  CUTE_UNROLL
  for (int apart = kWidth / 2; apart > 0; apart /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffff, value, apart));
  return value;
}

// That of a CTA. Every thread is past what it did with the numbers of an earlier call.
__device__ __forceinline__ float largest_of_cta(float value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float shared[kWarps];
  value = largest<32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return largest<kWarps>(shared[threadIdx.x % kWarps]);
}

// Four values, of which the first has the lowest byte; what is too large becomes the largest.
struct E4m3 {
  static constexpr float kLargest = 448.f;
  static constexpr bool kHasNaN = true;

  static __device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
  }
};

struct Int8 {
  static constexpr float kLargest = 127.f;
  static constexpr bool kHasNaN = false;

  static __device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
    uint32_t word;
    const int first = __float2int_rn(a), second = __float2int_rn(b), third = __float2int_rn(c), fourth = __float2int_rn(d);
    asm("{\n.reg .b32 high;\n"
        "cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n"
        "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}"
        : "=r"(word) : "r"(first), "r"(second), "r"(third), "r"(fourth));
    return word;
  }
};
using Scores = Int8;

// The factor that values are multiplied by, from their largest magnitude; 1 where this is 0, infinite or NaN.
template <class Type> __device__ __forceinline__ float factor_of(float peak) {
  const float factor = fminf(__fdiv_rn(Type::kLargest, peak), 3.402823466e38f);
  return peak > 0.f && peak < infinity() ? factor : 1.f;
}

// The scale of a factor: NaN where a type has none of its own to show that values are not finite.
template <class Type> __device__ __forceinline__ float scale_of(float factor, float peak) {
  return Type::kHasNaN || peak < infinity() ? __frcp_rn(factor) : not_a_number();
}

// 16 values; they are `finite` where all that share their factor are.
template <class Type, class Value>
__device__ __forceinline__ uint4 quantized(Value&& x, float factor, bool finite) {
  uint32_t words[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float four[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j] = __fmul_rn(x(4 * i + j), factor);
    words[i] = Type::packed(four[0], four[1], four[2], four[3]);
  }
  if (Type::kHasNaN && !finite) {  // e4m3 has no infinity: it is NaN
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i)
      if (fabsf(x(i)) == infinity()) words[i / 4] |= 0x7fu << i % 4 * 8;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// ---- The mean of k, and the largest magnitude of v ---------------------------------------------------------
// A CTA has a chunk of the keys of a head. The last of a head to be done puts those of all chunks together, in one
// order whichever it is.
constexpr int kChunk = 256, kAtOnce = 4;  // keys of a chunk; keys of which a thread loads values at once
// Threads that share a row, each with kEach values of it; rows that a CTA has at once.
constexpr int kEach = 16 / sizeof(Element), kSumLanes = 2 * kLanes, kSumRows = kThreads / kSumLanes;
static_assert(kChunk % (kSumRows * kAtOnce) == 0 && kDim <= kThreads);

union Eight {
  uint4 word;
  Element values[kEach];

  __device__ __forceinline__ Eight() {}
};

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_quantize_sm90a_bf16_d256_scores_int8_smooth_threads512_64397d0b_statistics(const __grid_constant__ Parameters p) {
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const TileCoord coord(blockIdx.x, p.kv_heads, p.chunks);
  const int64_t group = coord.group(p.kv_heads);
  const int lane = threadIdx.x % kSumLanes, key0 = coord.tile * kChunk + threadIdx.x / kSumLanes;
  const bool has_values = lane < kDim / kEach;
  const Element* v = p.v + coord.batch * p.v_batch + coord.head * p.v_head + lane * kEach;
  const Element* k = p.k + coord.batch * p.k_batch + coord.head * p.k_head + lane * kEach;
  float sums[kEach] = {};
  float peak = 0.f;
  CUTE_NO_UNROLL
  for (int first = 0; first < kChunk; first += kSumRows * kAtOnce) {
    Eight values[kAtOnce], keys[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t key = key0 + first + i * kSumRows;
      const bool there = has_values && key < p.seq_k;
      values[i].word = there ? *reinterpret_cast<const uint4*>(v + key * p.v_row) : make_uint4(0, 0, 0, 0);
      keys[i].word = there ? *reinterpret_cast<const uint4*>(k + key * p.k_row) : make_uint4(0, 0, 0, 0);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kEach; ++j) {
        peak = larger(peak, fabsf(float(values[i].values[j])));
        sums[j] += float(keys[i].values[j]);
      }
    }
  }
  peak = largest_of_cta(peak);
  if (threadIdx.x == 0) p.partial_peaks[group * p.chunks + coord.tile] = peak;
  __shared__ float4 shared[kThreads * 2];
  float* const columns = reinterpret_cast<float*>(shared);
  CUTE_UNROLL
  for (int j = 0; j < kEach / 4; ++j)
    shared[threadIdx.x * 2 + j] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  __syncthreads();
  if (threadIdx.x < kDim) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int row = 0; row < kSumRows; ++row) sum += columns[row * kSumLanes * kEach + threadIdx.x];
    p.partial_sums[(group * p.chunks + coord.tile) * kDim + threadIdx.x] = sum;
  }
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(p.arrivals + group, p.chunks - 1) == p.chunks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();  // the last CTA: all have written, and the workspace is left as zeros
  peak = 0.f;
  for (int chunk = threadIdx.x; chunk < p.chunks; chunk += kThreads)
    peak = larger(peak, __ldcg(p.partial_peaks + group * p.chunks + chunk));
  peak = largest_of_cta(peak);
  if (threadIdx.x == 0) {
    const float factor = factor_of<E4m3>(peak);
    p.v_factor[group] = factor, p.v_descale[group] = scale_of<E4m3>(factor, peak);
  }
  constexpr int kQuads = kDim / 4, kSlices = kThreads / kQuads;
  if (threadIdx.x < kQuads * kSlices) {
    const float4* partial = reinterpret_cast<const float4*>(p.partial_sums + group * p.chunks * kDim) + threadIdx.x % kQuads;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int chunk = threadIdx.x / kQuads; chunk < p.chunks; chunk += kSlices) {
      const float4 one = __ldcg(partial + int64_t(chunk) * kQuads);
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    shared[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kDim) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) sum += columns[slice * kDim + threadIdx.x];
    p.k_mean[group * kDim + threadIdx.x] = __fdiv_rn(sum, float(p.seq_k));
  }
}

// ---- v, transposed ------------------------------------------------------------------------------------
// The codes of a tile go through shared memory. Each 16 rows begin 16 bytes further on, so that threads that read from
// eight groups of 16 rows use all banks.
__device__ __forceinline__ void transpose_values(const Parameters& p, const TileCoord& coord) {
  constexpr int kKeys = 16, kGroups = kTile / kKeys;  // keys whose slots are mixed; such groups of a tile
  __shared__ uint4 codes[kTile * kParts + kGroups];
  const int lane = threadIdx.x % kLanes, row0 = threadIdx.x / kLanes, key0 = coord.tile * kTile;
  const int64_t group = coord.group(p.kv_heads);
  const Element* v = p.v + coord.batch * p.v_batch + coord.head * p.v_head + lane * kValues;
  Vector vectors[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t key = key0 + row0 + i * kRows;
    vectors[i].load(v + key * p.v_row, lane < kParts && key < p.seq_k);
  }
  const float factor = __ldcg(p.v_factor + group);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int row = row0 + i * kRows;
    const auto value = [&](int j) { return float(vectors[i].values[j]); };
    // Where anything is not finite the factor is 1.
    const uint4 bytes = quantized<E4m3>(value, factor, factor != 1.f);
    if (lane < kParts) codes[row * kParts + row / kKeys + lane] = bytes;
  }
  __syncthreads();
  // A warp has 16 rows of the transpose: a thread four of them, and a group of keys.
  const int keys = threadIdx.x % kGroups, quad = threadIdx.x % 32 / kGroups;
  const int64_t pitch = int64_t(p.tiles_k) * kTile;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(codes + keys * (kKeys * kParts + 1)) + quad;
  uint8_t* const out = p.v_out + (group * kDim + quad * 4) * pitch + key0 + keys * kKeys;
  CUTE_UNROLL
  for (int part = threadIdx.x / 32; part < kParts; part += kThreads / 32) {
    uint32_t columns[4][4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int slots[4] = {2 * i, 2 * i + 1, 8 + 2 * i, 8 + 2 * i + 1};  // the keys of four slots
      uint32_t rows[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) rows[j] = words[(slots[j] * kParts + part) * 4];
      const uint32_t low[2] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[2], rows[3], 0x5140)};
      const uint32_t high[2] = {__byte_perm(rows[0], rows[1], 0x7362), __byte_perm(rows[2], rows[3], 0x7362)};
      columns[0][i] = __byte_perm(low[0], low[1], 0x5410), columns[1][i] = __byte_perm(low[0], low[1], 0x7632);
      columns[2][i] = __byte_perm(high[0], high[1], 0x5410), columns[3][i] = __byte_perm(high[0], high[1], 0x7632);
    }
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<uint4*>(out + (part * kValues + j) * pitch) =
          make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
  }
}

// ---- q and k ------------------------------------------------------------------------------------------
// The mean of a head's keys, of the columns that a thread has; zeros where it has none.
struct Mean {
  float values[kValues];

  __device__ __forceinline__ Mean(const Parameters& p, int64_t group, int lane) {
    const bool has_values = lane < kParts;
    const float4* from = reinterpret_cast<const float4*>(p.k_mean + group * kDim + lane * kValues);
    CUTE_UNROLL
    for (int i = 0; i < kValues / 4; ++i) {
      const float4 four = has_values ? __ldcg(from + i) : make_float4(0.f, 0.f, 0.f, 0.f);
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  }
};

// The rows of a tile have a scale together.
__device__ __forceinline__ void quantize_keys(const Parameters& p, const TileCoord& coord) {
  const int lane = threadIdx.x % kLanes, row0 = coord.tile * kTile + threadIdx.x / kLanes;
  const int64_t group = coord.group(p.kv_heads);
  const Element* k = p.k + coord.batch * p.k_batch + coord.head * p.k_head + lane * kValues;
  uint8_t* const out = p.k_out + coord.batch * p.k_out_batch + coord.head * p.k_out_head + lane * kValues;
  Vector vectors[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t key = row0 + i * kRows;
    vectors[i].load(k + key * p.k_row, lane < kParts && key < p.seq_k);
  }
  const Mean mean(p, group, lane);
  const auto value = [&](int i, int j) { return __fsub_rn(float(vectors[i].values[j]), mean.values[j]); };
  float peak = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    if (row0 + i * kRows >= p.seq_k) continue;
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) peak = larger(peak, fabsf(value(i, j)));
  }
  peak = largest_of_cta(peak);
  const float factor = factor_of<Scores>(peak);
  if (threadIdx.x == 0) p.k_descale[group * p.tiles_k + coord.tile] = scale_of<Scores>(factor, peak);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t key = row0 + i * kRows;
    if (lane >= kParts || key >= p.seq_k) continue;
    const auto of_row = [&](int j) { return value(i, j); };
    *reinterpret_cast<uint4*>(out + key * p.k_out_row) = quantized<Scores>(of_row, factor, peak < infinity());
  }
}

// Each row has its own scale.
__device__ __forceinline__ void quantize_queries(const Parameters& p, const TileCoord& coord) {
  const int lane = threadIdx.x % kLanes, row0 = coord.tile * kTile + threadIdx.x / kLanes;
  const Element* q = p.q + coord.batch * p.q_batch + coord.head * p.q_head + lane * kValues;
  uint8_t* const out = p.q_out + coord.batch * p.q_out_batch + coord.head * p.q_out_head + lane * kValues;
  Vector vectors[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t row = row0 + i * kRows;
    vectors[i].load(q + row * p.q_row, lane < kParts && row < p.seq_q);
  }
  const Mean mean(p, int64_t(coord.batch) * p.kv_heads + coord.head / (p.heads / p.kv_heads), lane);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t row = row0 + i * kRows, scale = coord.group(p.heads) * p.seq_q + row;
    const auto value = [&](int j) { return float(vectors[i].values[j]); };
    float peak = 0.f;
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) peak = larger(peak, fabsf(value(j)));
    peak = largest<kLanes>(peak);
    float product = 0.f;
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) product = __fmaf_rn(value(j), mean.values[j], product);
    CUTE_UNROLL
    for (int apart = kLanes / 2; apart > 0; apart /= 2) product += __shfl_xor_sync(0xffffffff, product, apart);
    const float factor = factor_of<Scores>(peak);
    if (lane >= kParts || row >= p.seq_q) continue;
    *reinterpret_cast<uint4*>(out + row * p.q_out_row) = quantized<Scores>(value, factor, peak < infinity());
    if (lane == 0) {
      p.q_descale[scale] = scale_of<Scores>(factor, peak);
      p.score_shift[scale] = product;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_quantize_sm90a_bf16_d256_scores_int8_smooth_threads512_64397d0b(const __grid_constant__ Parameters p) {
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (int(blockIdx.x) >= p.key_tiles) {
    quantize_queries(p, TileCoord(blockIdx.x - p.key_tiles, p.heads, p.tiles_q));
    return;
  }
  // The last keys first: of what the launch before has read, they are in the cache.
  const int index = p.key_tiles - 1 - blockIdx.x;
  const TileCoord coord(index / 2, p.kv_heads, p.tiles_k);
  if (index % 2 == 0) quantize_keys(p, coord);
  else transpose_values(p, coord);
}
