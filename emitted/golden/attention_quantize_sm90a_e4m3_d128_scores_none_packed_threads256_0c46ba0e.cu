// attention_quantize_sm90a_e4m3_d128_scores_none_packed_threads256_0c46ba0e
//
// v of attention e4m3, rows of 128, packed sequences, transposed: [dim][keys]
// In each 16 keys of the transposed v, slot 4 t + u has key u / 2 * 8 + 2 t + u % 2, so that accumulators of scores are
// operands of the product with v as they are.
// Digest 0c46ba0e9f00ccad6e4abac7095de994f02da6247cbe1262d40c581a4726eb82; `warploom show` prints this file.
//
// Launch: 256 threads; grid: a CTA per 128 rows of a head of v
// 8 threads of a warp share a row, 16 values each; registers as the compiler allots them.
// Shared memory, static: 16512 bytes, the codes of 128 rows of v on their way to the transpose
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

using Element = cutlass::float_e4m3_t;
constexpr int kThreads = 256, kDim = 128;
// A CTA has kTile rows of a head; a thread quantizes kValues values of a row at once. kLanes threads share a row, of
// which kParts have values. A CTA has kRows rows at once.
constexpr int kTile = 128, kValues = 16, kLanes = 8, kParts = kDim / kValues;
constexpr int kRows = kThreads / kLanes, kVectors = kTile / kRows;
static_assert(kVectors * kRows == kTile && kDim % kValues == 0);

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const cutlass::float_e4m3_t* v;  // [batch][kv_heads][seq_k][dim]
  uint8_t* v_out;  // [batch][kv_heads][dim][tiles_k * 128]: v in e4m3, transposed
  const int* cu_seqlens;  // [sequences + 1]: where sequences begin in v, and the end
  int64_t v_batch;  // elements of v from batch to batch
  int64_t v_head;  // elements of v from head to head
  int64_t v_row;  // elements of v from row to row
  int32_t kv_heads;  // heads of k and v
  int32_t seq_k;  // keys of a batch
  int32_t tiles_k;  // tiles of keys, of one head
  int32_t sequences;  // at least one
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, v) == 0 && OFFSET(Parameters, v_out) == 8);
static_assert(OFFSET(Parameters, cu_seqlens) == 16 && OFFSET(Parameters, v_batch) == 24);
static_assert(OFFSET(Parameters, v_head) == 32 && OFFSET(Parameters, v_row) == 40);
static_assert(OFFSET(Parameters, kv_heads) == 48 && OFFSET(Parameters, seq_k) == 52);
static_assert(OFFSET(Parameters, tiles_k) == 56 && OFFSET(Parameters, sequences) == 60);

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

// ---- v, transposed ------------------------------------------------------------------------------------
// The keys of a tile as rows of v: of one sequence, since sequence i begins in the transpose at cu_seqlens[i] +
// (kTile - 1) i, rounded down to a multiple of kTile.
struct TileKeys {
  int64_t first, end;

  __device__ __forceinline__ TileKeys(const Parameters& p, int tile) {
    int low = 0, high = p.sequences;  // the last sequence that begins at this tile or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile(p, middle) <= tile) low = middle;
      else high = middle;
    }
    // Offsets are not checked by the host: whatever they are, only rows of v are read.
    first = max(int64_t(0), p.cu_seqlens[low] + (tile - first_tile(p, low)) * kTile);
    end = min(p.cu_seqlens[low + 1], p.seq_k);
  }
  static __device__ __forceinline__ int64_t first_tile(const Parameters& p, int sequence) {
    return (p.cu_seqlens[sequence] + int64_t(kTile - 1) * sequence) / kTile;
  }
};

// The codes of a tile go through shared memory. Each 16 rows begin 16 bytes further on, so that threads that read from
// eight groups of 16 rows use all banks.
__device__ __forceinline__ void transpose_values(const Parameters& p, const TileCoord& coord) {
  constexpr int kKeys = 16, kGroups = kTile / kKeys;  // keys whose slots are mixed; such groups of a tile
  __shared__ uint4 codes[kTile * kParts + kGroups];
  const int lane = threadIdx.x % kLanes, row0 = threadIdx.x / kLanes, key0 = coord.tile * kTile;
  const int64_t group = coord.group(p.kv_heads);
  const Element* v = p.v + coord.batch * p.v_batch + coord.head * p.v_head + lane * kValues;
  Vector vectors[kVectors];
  const TileKeys keys_of_tile(p, coord.tile);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int64_t key = keys_of_tile.first + row0 + i * kRows;
    vectors[i].load(v + key * p.v_row, lane < kParts && key < keys_of_tile.end);
  }
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int row = row0 + i * kRows;
    const uint4 bytes = vectors[i].words[0];
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

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_quantize_sm90a_e4m3_d128_scores_none_packed_threads256_0c46ba0e(const __grid_constant__ Parameters p) {
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  transpose_values(p, TileCoord(blockIdx.x, p.kv_heads, p.tiles_k));
}
