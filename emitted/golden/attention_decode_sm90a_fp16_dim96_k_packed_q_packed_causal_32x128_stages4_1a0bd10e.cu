// attention_decode_sm90a_fp16_dim96_k_packed_q_packed_causal_32x128_stages4_1a0bd10e
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = scale q k^T, of few rows of q by long k and v
//   q fp16 packed, k and v fp16 packed, head dimension 96
//   mask causal
//   32 rows of q by 128 keys, 8 warps of 16 rows, 4 stages
// Digest 1a0bd10e3afb27cce7ff511e712487b36ad5c8192a3d9aa262f423c63657fdfe; `warploom show` prints this file.
//
// Launch: 288 threads, 1 CTA per SM; grid: as many CTAs as all SMs hold
//   CTAs divide the tiles of keys of all sequences; partial results go through global
//   memory, and whichever CTA of a sequence and KV head comes last adds them up
// Warps 0 to 7, the consumers: mma.sync on 16 rows of q and 1/4 of the keys of a tile each
// Warp 8, the producer: its lanes issue the TMA loads of k and v
// Registers per thread: at most 168, for 1 CTA of 288 threads per SM
//   A consumer thread needs about 146: 48 output, 24 of q, 74 scores and others
// Shared memory: 214144 bytes; the launch asks for 215168 of 232448
//   k, v         4 stages * 2 * 24576 = 196608
//   merged       8 warps * 16 rows * 32 columns * 4 = 16384
//   sums         8 warps * 16 rows * 8 = 1024
//   full, empty  4 stages * 4 * 8 = 128
// Barriers        waited for by    guards                         a phase completes after
// k_full, v_full  consumers        a stage until it is filled     1 arrival and the bytes of TMA
// k_empty         the producer     k until the scores are there   8 arrivals: consumer warps
// v_empty         the producer     v until the output is there    8 arrivals: consumer warps
// named 1         all that arrive  outputs until they are summed  256 threads of consumers
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

// ---- Operation and schedule --------------------------------------------------------------------
using Element = cutlass::half_t;
constexpr int kDim = 96, kKvBytes = 2, kRowBytes = kDim * kKvBytes;
constexpr int kRows = 32, kKeys = 128;  // of a tile: rows of q, and of k and v
constexpr int kWarps = 8, kThreads = 288;  // consumer warps; threads, with those of the producer warp
constexpr int kRowWarps = kRows / 16, kKeyWarps = kWarps / kRowWarps;  // of other rows; of other keys of the same rows
constexpr int kSlices = kKeys / (16 * kKeyWarps);  // of 16 keys, a warp's in a tile
constexpr int kStages = 4;
constexpr int kFragments = kDim / 8, kSteps = kDim / 16;  // of 8 columns of o; of 16 of q
constexpr float kSlack = 8;  // how far exponents of 2 may grow before o is rescaled
constexpr auto kCacheHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);  // each key is read once
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor k_map;  // [column of a piece, row, piece, head, entry of the cache]
  cute::TmaDescriptor v_map;  // [column of a piece, row, piece, head, entry of the cache]
  const cutlass::half_t* q;  // rows of every head
  cutlass::half_t* o;  // as q, but for its strides
  float* lse;  // [heads, total_q]
  const int32_t* cu_seqlens_q;  // first row of each sequence, and the end
  float* parts;  // o of parts of items, unscaled: [place, row, dim]
  float2* sums;  // maximum and sum of their rows: [place, row]
  uint32_t* counters;  // parts of an item, by warps; 0 between launches
  const int32_t* cu_seqlens_k;  // first key of each sequence, and the end
  int64_t q_head_stride;  // elements
  int64_t q_row_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int32_t seq_q;  // rows of a sequence, at most
  int32_t total_q;  // rows of all of them
  int32_t part_rows;  // of a part
  int32_t batch;  // sequences
  int32_t kv_heads;  // of a sequence
  int32_t sharing;  // heads of one kv head
  int32_t row_tiles;  // of one kv head and sequence, at most
  int32_t seq_k;  // keys of a sequence, at most
  int32_t total_k;  // keys of all
  int32_t right;  // nor one after its own + right
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, k_map) == 0 && OFFSET(Parameters, v_map) == 128);
static_assert(OFFSET(Parameters, q) == 256 && OFFSET(Parameters, o) == 264);
static_assert(OFFSET(Parameters, lse) == 272 && OFFSET(Parameters, cu_seqlens_q) == 280);
static_assert(OFFSET(Parameters, parts) == 288 && OFFSET(Parameters, sums) == 296);
static_assert(OFFSET(Parameters, counters) == 304 && OFFSET(Parameters, cu_seqlens_k) == 312);
static_assert(OFFSET(Parameters, q_head_stride) == 320 && OFFSET(Parameters, q_row_stride) == 328);
static_assert(OFFSET(Parameters, o_head_stride) == 336 && OFFSET(Parameters, o_row_stride) == 344);
static_assert(OFFSET(Parameters, seq_q) == 352 && OFFSET(Parameters, total_q) == 356);
static_assert(OFFSET(Parameters, part_rows) == 360 && OFFSET(Parameters, batch) == 364);
static_assert(OFFSET(Parameters, kv_heads) == 368 && OFFSET(Parameters, sharing) == 372);
static_assert(OFFSET(Parameters, row_tiles) == 376 && OFFSET(Parameters, seq_k) == 380);
static_assert(OFFSET(Parameters, total_k) == 384 && OFFSET(Parameters, right) == 388);
static_assert(OFFSET(Parameters, scale) == 392);

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// ---- Which keys and rows ------------------------------------------------------------------------
// A sequence's rows of q and its keys.
struct Sequence {
  int first_row;
  int first_key;
  int rows, keys;

  __device__ __forceinline__ static Sequence at(const Parameters& p, int b) {
    Sequence found;
    found.first_row = offset(p.cu_seqlens_q[b], p.total_q);
    found.rows = max(0, min(p.seq_q, offset(p.cu_seqlens_q[b + 1], p.total_q) - found.first_row));
    found.first_key = offset(p.cu_seqlens_k[b], p.total_k);
    found.keys = max(0, min(p.seq_k, offset(p.cu_seqlens_k[b + 1], p.total_k) - found.first_key));
    return found;
  }
  // Offsets are unchecked, in GPU memory: each is clamped to the tensor.
  __device__ __forceinline__ static int offset(int found, int total) { return max(0, min(found, total)); }

  // As lane `from` has it.
  __device__ __forceinline__ Sequence of_lane(int from) const {
    Sequence found;
    found.first_row = __shfl_sync(~0u, first_row, from);
    found.first_key = __shfl_sync(~0u, first_key, from);
    found.rows = __shfl_sync(~0u, rows, from);
    found.keys = __shfl_sync(~0u, keys, from);
    return found;
  }

  // Row r stands at key keys - rows + r: what it sees is [begin(r), end(r)).
  __device__ __forceinline__ int begin(const Parameters& p, int r) const {
    return 0;
  }
  __device__ __forceinline__ int end(const Parameters& p, int r) const {
    return max(0, min(keys, keys - rows + r + p.right + 1));
  }

  // Tiles of keys that some row sees: `count` from the one numbered `first` on.
  struct Tiles { int first, count; };
  __device__ __forceinline__ Tiles tiles(const Parameters& p) const {
    const int first = begin(p, 0) / kKeys;
    return {first, max(0, (end(p, rows - 1) + kKeys - 1) / kKeys - first)};
  }
  __device__ __forceinline__ int row_tiles(const Parameters& p) const {
    return (rows * p.sharing + kRows - 1) / kRows;
  }

  // What is divided among CTAs: tiles of keys of each tile of rows. One that sees nothing has a result, too.
  __device__ __forceinline__ int weight(const Parameters& p) const { return max(1, tiles(p).count); }
  __device__ __forceinline__ int work(const Parameters& p) const { return weight(p) * row_tiles(p) * p.kv_heads; }
};

// Of numbers that are not negative: fewer instructions than with a sign.
__device__ __forceinline__ int quotient(int of, int by) { return int(uint32_t(of) / uint32_t(by)); }

// The tiles of all items are divided among CTAs in ranges of `each`, in order; the first `more` ranges have one more.
struct Division {
  int each, more;

  __device__ __forceinline__ Division(int total, int ranges) : each(quotient(total, ranges)),
      more(total - each * ranges) {}
  __device__ __forceinline__ int begin(int range) const { return each * range + min(range, more); }
  // The range that a tile is in.
  __device__ __forceinline__ int owner(int tile) const {
    const int longer = more * (each + 1);
    return tile < longer ? quotient(tile, each + 1) : more + quotient(tile - longer, each);
  }
};

// Finds the sequence of a tile. Each warp does so by itself: a lane has one of 32 sequences, and how many tiles
// all sequences up to its own have.
struct SequenceScan {
  int base, through;  // the sequence of lane 0; tiles of all sequences up to this lane's
  Sequence own;

  __device__ __forceinline__ int load(const Parameters& p) {
    own = Sequence::at(p, min(base + lane(), p.batch - 1));
    return base + lane() < p.batch ? own.work(p) : 0;
  }

  // The tiles of all sequences. The first 32 sequences are loaded last, and stay.
  __device__ __forceinline__ int total(const Parameters& p) {
    int sum = 0;
    CUTE_NO_UNROLL
    for (base = (p.batch - 1) / 32 * 32;; base -= 32) {
      through = load(p);
      sum += through;
      if (base == 0) break;
    }
    return __reduce_add_sync(~0u, sum);
  }

  // From the tiles of each lane's sequence to those up to it, `before` the first.
  __device__ __forceinline__ void add_up(int before) {
    CUTE_UNROLL
    for (int by = 1; by < 32; by *= 2) {
      const int less = __shfl_up_sync(~0u, through, by);
      if (lane() >= by) through += less;
    }
    through += before;
  }

  // The lane that has the sequence of a tile, which is not before those that were looked for.
  __device__ __forceinline__ int find(const Parameters& p, int tile) {
    for (;;) {
      const int found = __popc(__ballot_sync(~0u, through <= tile));
      if (found < 32) return found;
      const int before = __shfl_sync(~0u, through, 31);
      base += 32;
      through = load(p);
      add_up(before);
    }
  }
};

// An item is a tile of rows of one sequence and KV head, and the tiles of keys of this CTA: from `begin` to
// `end` of `weight`, the first of which is tile `first` of the sequence's keys. Where these are not all, their
// result is one of `parts` partial results.
//
// An example: three items of 8 tiles on five CTAs. These have 5, 5, 5, 5 and 4 of the 24 tiles: item 0 is in
// parts of 5 (CTA 0) and 3 (CTA 1), item 1 of 2 (CTA 1), 5 (CTA 2) and 1 (CTA 3), item 2 of 4 (CTA 3) and 4
// (CTA 4).
struct Item {
  Sequence sequence;
  int batch, head, row_tile;
  int begin, end, first, weight;
  int parts, part_place;  // how many CTAs have some of it; where this CTA's partial result is
  int first_place;        // where that of its first part is

  __device__ __forceinline__ int begin_key(const Parameters& p) const { return sequence.begin(p, 0); }
  __device__ __forceinline__ int end_key(const Parameters& p) const { return sequence.end(p, sequence.rows - 1); }
  __device__ __forceinline__ int number(const Parameters& p) const {
    return (batch * p.kv_heads + head) * p.row_tiles + row_tile;
  }
  // Where partial results are: a CTA has the last part of one item at 2 b, and the first of another at 2 b + 1.
  __device__ __forceinline__ int place_of(int part) const { return first_place + 2 * part + (part == 0); }
};

// Goes through a CTA's range of tiles, which may begin and end within items.
struct TileScheduler : SequenceScan {
  Division division;
  int at, stop;  // what is left of the range

  __device__ __forceinline__ explicit TileScheduler(const Parameters& p) : division(total(p), gridDim.x) {
    at = division.begin(blockIdx.x);
    stop = division.begin(blockIdx.x + 1);
    add_up(0);
  }

  // The item of tile `at`, and where it starts.
  __device__ __forceinline__ int locate(const Parameters& p, Item& item) {
    const int from = find(p, at);
    item.sequence = own.of_lane(from);
    item.batch = base + from;
    const Sequence::Tiles tiles = item.sequence.tiles(p);
    item.first = tiles.first;
    item.weight = max(1, tiles.count);
    const int row_tiles = item.sequence.row_tiles(p);
    const int start = __shfl_sync(~0u, through, from) - item.weight * row_tiles * p.kv_heads;
    const int index = quotient(at - start, item.weight);
    item.head = index;
    if (row_tiles > 1) item.head = quotient(index, row_tiles);
    item.row_tile = index - item.head * row_tiles;
    return start + index * item.weight;
  }

  __device__ __forceinline__ bool next(const Parameters& p, Item& item) {
    if (at >= stop) return false;
    const int start = locate(p, item);
    item.begin = at - start;
    item.end = min(item.weight, stop - start);
    at = start + item.end;
    return true;
  }

  // What other CTAs have of the last item: how many they are, and where the partial results go.
  __device__ __forceinline__ void share(Item& item) const {
    const bool whole = item.begin == 0 && item.end == item.weight;
    const int start = at - item.end, first = division.owner(start);
    item.parts = whole ? 1 : division.owner(start + item.weight - 1) - first + 1;
    item.first_place = 2 * first;
    item.part_place = 2 * blockIdx.x + (item.begin == 0 ? 1 : 0);
  }
};

// ---- Device functions -----------------------------------------------------------------------
// A stage of the pipeline and the phase parity to wait for.
template <int kDepth> struct PipelineState {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kDepth ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};
using Position = PipelineState<kStages>;

// A stage of k or v in shared memory: boxes of kBoxRows rows, each in pieces of kSpan bytes of a row, swizzled.
struct Tile {
  static constexpr int kSpan = 64, kPieces = kRowBytes / kSpan;
  static constexpr int kBoxRows = 64, kBoxes = kKeys / kBoxRows;
  static constexpr int kPieceBytes = kBoxRows * kSpan, kBoxBytes = kPieces * kPieceBytes,
      kBytes = kBoxes * kBoxBytes;

  // Where a slice of 16 rows begins.
  __device__ __forceinline__ static int slice(int slice) {
    constexpr int kOfBox = kBoxRows / 16;
    return slice / kOfBox * kBoxBytes + slice % kOfBox * 16 * kSpan;
  }

  // Where a lane finds what it reads first of a slice: `row` of its 16, and 16 of 32 bytes. TMA's swizzle: of
  // columns of 16 bytes, the number XOR that of the row, or of pairs of rows, or of fours.
  __device__ __forceinline__ static int place(int row, int half) {
    constexpr int kColumns = kSpan / 16;
    return row * kSpan + (half ^ (row * kSpan / 128) % kColumns) * 16;
  }

  // Its 32 bytes numbered `read` after that.
  __device__ __forceinline__ static uint32_t moved(uint32_t from, int read) {
    constexpr int kOfPiece = kSpan / 32;
    return (from ^ read % kOfPiece * 32) + read / kOfPiece * kPieceBytes;
  }
};
constexpr int kMerged = 32;  // columns of o that warps leave for each other at a time
// A swizzle against bank conflicts: groups of 8 columns change places from row to row.
__device__ __forceinline__ constexpr int merged_column(int row, int column) { return column ^ row % 4 * 8; }

struct SharedStorage {
  alignas(1024) uint8_t k[kStages][Tile::kBytes];
  alignas(1024) uint8_t v[kStages][Tile::kBytes];
  alignas(16) float merged[kWarps][16][kMerged];  // o of each warp, some columns at a time
  float2 sums[kWarps][16];                        // maximum and sum of its rows
  FullBarrier k_full[kStages], v_full[kStages];
  EmptyBarrier k_empty[kStages], v_empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 215168);

// ---- Producer: one warp keeps the rings of k and v full -------------------------------------------
// Where the lane's box of a tile is in the cache.
struct Corner { int row, entry; };

// Starts the loads of the boxes of a tile that have keys. Rows past the last key hold other keys or
// what was there before: consumers mask them.
__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier& full, EmptyBarrier& empty,
                                     uint32_t phase, uint8_t* tile, int boxes, Corner corner, int head) {
  empty.wait(phase);
  if (lane() == 0) full.arrive_and_expect_tx(boxes * Tile::kBoxBytes);
  __syncwarp();
  if (lane() < boxes)
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), kCacheHint,
                                 tile + lane() * Tile::kBoxBytes, 0,
                                 corner.row, 0, head, corner.entry);
}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, TileScheduler& scheduler) {
  Position position{0, 1};  // a new barrier has completed the phase of parity 1: the first waits return
  for (Item item; scheduler.next(p, item);) {
    const int end_key = item.end_key(p);
    const int begin = item.first + item.begin, end = min(item.first + item.end, (end_key + kKeys - 1) / kKeys);
    if (begin >= end) continue;  // no row of the item sees a key
    CUTE_NO_UNROLL
    for (int tile = begin; tile < end; ++tile) {
      const int key = tile * kKeys,
                boxes = min(Tile::kBoxes, (end_key - key + Tile::kBoxRows - 1) / Tile::kBoxRows);
      const Corner corner{item.sequence.first_key + key + lane() * Tile::kBoxRows, 0};
      const int stage = position.stage;
      load(p.k_map, shared.k_full[stage], shared.k_empty[stage], position.phase, shared.k[stage], boxes,
           corner, item.head);
      load(p.v_map, shared.v_full[stage], shared.v_empty[stage], position.phase, shared.v[stage], boxes,
           corner, item.head);
      position.advance();
    }
  }
}

// ---- Scores, softmax and MMAs ---------------------------------------------------------------
// Of a warp, 16 rows by 16 by 8 columns (PTX ISA, mma.m16n8k16): lane l has, of a, rows l / 4 and 8 below and
// of each columns 2 (l % 4) and the next, and 8 to the right; of b, the same columns' rows of column l / 4; of
// d, rows as of a and columns 2 (l % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
      "{ %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

// Loads four matrices of 8 rows of 16 bytes; lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i. Of
// each matrix lane l gets the four bytes of row l / 4 that begin with byte 4 (l % 4).
__device__ __forceinline__ void read(uint32_t (&found)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(from)
               : "memory");
}
// The same, transposed by pairs of bytes: lane l gets pair l / 4 of row 2 (l % 4) and of the row below.
__device__ __forceinline__ void read_transposed(uint32_t (&found)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ uint32_t pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

using Scores = float[kSlices][2][4];   // of 16 rows by slices of 16 keys, of which a fragment has 8
using Outputs = float[kFragments][4];  // of 16 rows
using Hidden = uint32_t[2];            // masks of values: of keys as b has them, the first 8 and the others

constexpr float kUnit = 1;

// Rows of q as the MMAs take them: two of a lane, null for rows that there are not.
struct Queries {
  uint32_t a[kSteps][4];

  __device__ __forceinline__ void load(const Element* const (&rows)[2]) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Element* const row = rows[i % 2];
        const int column = step * 16 + i / 2 * 8 + lane() % 4 * 2;
        a[step][i] = row ? *reinterpret_cast<const uint32_t*>(row + column) : 0;
      }
    }
  }
};

// What a lane reads of a slice: k's rows are b's columns, and v's rows its rows.
__device__ __forceinline__ int key_place() { return Tile::place(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2); }
__device__ __forceinline__ int value_place() { return Tile::place(lane() % 16, lane() / 16); }

__device__ __forceinline__ void multiply_keys(float (&scores)[2][4], const Queries& queries, uint32_t from) {
  CUTE_UNROLL
  for (int n = 0; n < 2; ++n)
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    uint32_t keys[4];
    read(keys, Tile::moved(from, step));
    multiply(scores[0], queries.a[step], keys[0], keys[1]);
    multiply(scores[1], queries.a[step], keys[2], keys[3]);
  }
}

template <bool kMasked>
__device__ __forceinline__ void multiply_values(Outputs& outputs, const uint32_t (&weights)[4], uint32_t from,
                                                const Hidden& hidden) {
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    uint32_t values[4];
    read_transposed(values, Tile::moved(from, step));
    if (kMasked) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) values[i] &= hidden[i % 2];
    }
    multiply(outputs[2 * step], weights, values[0], values[1]);
    multiply(outputs[2 * step + 1], weights, values[2], values[3]);
  }
}

// Leaves `kMerged` columns of the warp's rows, numbered `part`, in order.
__device__ __forceinline__ void leave(float (&to)[16][kMerged], const Outputs& outputs, int part) {
  CUTE_UNROLL
  for (int f = 0; f < kMerged / 8; ++f) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane() / 4;
      const float* const from = outputs[part * (kMerged / 8) + f] + 2 * r;
      *reinterpret_cast<float2*>(&to[row][merged_column(row, f * 8 + lane() % 4 * 2)]) = {from[0], from[1]};
    }
  }
}

// The softmax by rows, in base 2.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest, or the sum, of what the four lanes that share a row hold.
__device__ __forceinline__ float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// From products of q and k to the softmax's scores. A factor of 0 would make NaNs of scores that are hidden.
struct Scaling {
  float exponent;  // the factor of a score in the argument of exp2
  float unit;      // of what is added up of weights and values

  __device__ __forceinline__ Scaling(const Parameters& p, int head) {
    const float scale = p.scale * kUnit;
    unit = kUnit;
    exponent = fmaxf(scale * kLog2E, 1e-30f);
  }
};

// What a lane knows of its two rows. Sums are its own columns' only, until the end.
struct Rows {
  int begin[2], end[2];  // the keys that they see
  float maximum[2];      // of the scores so far, or up to kSlack less, as an exponent of 2
  float sum[2];
};

// Hides the keys of the warp's slices that rows do not see; `key` is the lane's first of the first slice.
__device__ __forceinline__ void mask(Scores& scores, const Rows& rows, int key) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int end = rows.end[r] - key;
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 4; ++i) {
      const int place = i / 4 * 16 + i / 2 % 2 * 8 + i % 2;
      if (place >= end) scores[i / 4][i / 2 % 2][2 * r + i % 2] = minus_infinity();
    }
  }
}

// Turns scores into exp2(exponent (score - maximum)), takes note of maximum and sum, and rescales what was
// summed before, where a maximum of the warp's rows grew.
__device__ __forceinline__ void softmax(Scores& scores, Rows& rows, Outputs& outputs, float exponent) {
  float rescale[2];
  bool grew = false;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float maximum = rows.maximum[r];
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 4; ++i) maximum = fmaxf(maximum, scores[i / 4][i / 2 % 2][2 * r + i % 2]);
    maximum = quad_maximum(maximum);
    if (!((maximum - rows.maximum[r]) * exponent > kSlack)) maximum = rows.maximum[r];  // nor where both are -inf
    const float reference = maximum == minus_infinity() ? 0 : maximum, shift = reference * exponent;
    rescale[r] = fast_exp2((rows.maximum[r] - reference) * exponent);  // exactly 1 where the maximum stays
    grew |= maximum != rows.maximum[r];
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 4; ++i) {
      float& x = scores[i / 4][i / 2 % 2][2 * r + i % 2];
      x = fast_exp2(x * exponent - shift);
      sum += x;
    }
    rows.sum[r] = rows.sum[r] * rescale[r] + sum;
  }
  if (!__any_sync(~0u, grew)) return;
  CUTE_UNROLL
  for (int f = 0; f < kFragments; ++f)
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) outputs[f][i] *= rescale[i / 2];
}

// ---- Results ------------------------------------------------------------------------------------
// A row of an item: its head, and which of the sequence's rows of q it is.
struct Row {
  int head, row;

  __device__ __forceinline__ static Row at(const Parameters& p, const Item& item, int in_tile) {
    const int index = item.row_tile * kRows + in_tile, row = index / p.sharing;  // heads side by side
    return {item.head * p.sharing + index - row * p.sharing, row};
  }
  __device__ __forceinline__ bool there(const Item& item) const { return row < item.sequence.rows; }

  // Where it begins in a tensor of these strides.
  __device__ __forceinline__ int64_t in(const Item& item, int64_t head_stride, int64_t row_stride) const {
    return head * head_stride + (item.sequence.first_row + row) * row_stride;
  }
  __device__ __forceinline__ const Element* of_q(const Parameters& p, const Item& item) const {
    return p.q + in(item, p.q_head_stride, p.q_row_stride);
  }
  __device__ __forceinline__ Element* of_o(const Parameters& p, const Item& item) const {
    return p.o + in(item, p.o_head_stride, p.o_row_stride);
  }
  __device__ __forceinline__ float* of_lse(const Parameters& p, const Item& item) const {
    return p.lse + in(item, p.total_q, 1);
  }
};

// Rows of an item that are there.
__device__ __forceinline__ int rows_there(const Parameters& p, const Item& item) {
  return min(kRows, item.sequence.rows * p.sharing - item.row_tile * kRows);
}

// What is added up of exp2(score - maximum) v; the sum, of weights, is 0 where there is none and the maximum
// -inf.
struct Total {
  float maximum, sum;
  float4 value;  // of four columns

  __device__ __forceinline__ Total() : maximum(minus_infinity()), sum(0), value{0, 0, 0, 0} {}

  // Adds up to `kCount` others, in their order: their maxima and sums, and values.
  template <int kCount>
  __device__ __forceinline__ void add(const float2 (&sums)[kCount], const float4 (&values)[kCount]) {
    float grown = maximum;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) grown = fmaxf(grown, sums[i].x);
    const float reference = grown == minus_infinity() ? 0 : grown;
    scale(fast_exp2(maximum - reference));
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const float factor = fast_exp2(sums[i].x - reference);
      sum += factor * sums[i].y;
      value.x += factor * values[i].x;
      value.y += factor * values[i].y;
      value.z += factor * values[i].z;
      value.w += factor * values[i].w;
    }
    maximum = grown;
  }
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    value = {value.x * factor, value.y * factor, value.z * factor, value.w * factor};
  }
};

// Stores four columns of a row, times `unit`, and with the first lse.
__device__ __forceinline__ void finish(const Parameters& p, const Item& item, int in_tile, int column,
                                       Total total, float unit) {
  const Row row = Row::at(p, item, in_tile);
  if (column == 0)
    *row.of_lse(p, item) = total.sum > 0 ? (total.maximum + fast_log2(total.sum)) * kLn2 : minus_infinity();
  total.scale(total.sum > 0 ? __fdividef(unit, total.sum) : 0);
  const uint2 packed{pair(total.value.x, total.value.y), pair(total.value.z, total.value.w)};
  *reinterpret_cast<uint2*>(row.of_o(p, item) + column) = packed;
}

__device__ __forceinline__ void synchronise_warps() { cutlass::arch::NamedBarrier::sync(kWarps * 32, 1); }

// Leaves maxima and sums of the warp's rows for the other warps.
__device__ __forceinline__ void leave_sums(SharedStorage& shared, const Rows& rows, float exponent, int warp) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    if (lane() % 4 == 0) shared.sums[warp][r * 8 + lane() / 4] = {rows.maximum[r] * exponent, sum};
  }
}

// What the warps have left of four columns of a row.
__device__ __forceinline__ Total of_warps(const SharedStorage& shared, int row, int four) {
  Total total;
  float2 sums[kKeyWarps];
  float4 values[kKeyWarps];
  CUTE_UNROLL
  for (int i = 0; i < kKeyWarps; ++i) {
    const int warp = row / 16 * kKeyWarps + i;
    sums[i] = shared.sums[warp][row % 16];
    values[i] = *reinterpret_cast<const float4*>(&shared.merged[warp][row % 16][merged_column(row, four * 4)]);
  }
  total.add(sums, values);
  return total;
}

// Counts what a warp has written before this, and lets it see what others have that counted before.
__device__ __forceinline__ uint32_t count_up(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Warps that have other keys of the same rows add up what they have, and so do CTAs that have a part of an item
// each: always in the same order.
struct Merge {
  static constexpr int kFours = kMerged / 4, kRowsAtOnce = 32 / kFours;  // of a row; of a warp
  const Parameters& p;
  SharedStorage& shared;
  const Item& item;
  float unit;
  int there = rows_there(p, item);

  // Stores what the CTA has of an item: its result, or a part of it. A warp has whole rows of that, and waits
  // for no other: where it is the last to leave its rows, of the CTAs that have a part, it adds all up.
  __device__ __forceinline__ void store(const Outputs& outputs, const Rows& rows, float exponent,
                                        int warp) const {
    synchronise_warps();  // what was left of the item before has been read
    leave_sums(shared, rows, exponent, warp);
    CUTE_UNROLL
    for (int part = 0; part < kDim / kMerged; ++part) {
      if (part > 0) synchronise_warps();
      leave(shared.merged[warp], outputs, part);
      synchronise_warps();
      CUTE_NO_UNROLL
      for (int i = threadIdx.x; i < there * kFours; i += kWarps * 32) {
        const int row = i / kFours, column = part * kMerged + i % kFours * 4;
        const Total total = of_warps(shared, row, i % kFours);
        if (item.parts == 1) finish(p, item, row, column, total, unit);
        else leave_part(row, column, total);
      }
    }
    if (item.parts > 1 && warp * kRowsAtOnce < there && last_to_leave(warp)) combine();
  }

  __device__ __forceinline__ int64_t place(int place, int row) const { return int64_t(place) * p.part_rows + row; }

  __device__ __forceinline__ void leave_part(int row, int column, const Total& total) const {
    const int64_t at = place(item.part_place, row);
    *reinterpret_cast<float4*>(p.parts + at * kDim + column) = total.value;
    if (column == 0) p.sums[at] = {total.maximum, total.sum};
  }

  __device__ __forceinline__ bool last_to_leave(int warp) const {
    uint32_t before = 0;
    __syncwarp();
    if (lane() == 0) {
      uint32_t* const counter = p.counters + item.number(p) * kWarps + warp;
      before = count_up(counter);
      if (before + 1 == item.parts) *counter = 0;  // as the next launch must find it
    }
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();
    return before + 1 == item.parts;
  }

  // Adds up all parts of the warp's rows. From L2, where other CTAs left them.
  __device__ __forceinline__ void combine() const {
    constexpr int kAtOnce = 8;  // that are on their way together
    CUTE_NO_UNROLL
    for (int columns = 0; columns < kDim; columns += kMerged) {
      CUTE_NO_UNROLL
      for (int i = threadIdx.x; i < there * kFours; i += kWarps * 32) {
        const int row = i / kFours, column = columns + i % kFours * 4;
        Total total;
        CUTE_NO_UNROLL
        for (int part = 0; part < item.parts; part += kAtOnce) {
          float2 sums[kAtOnce];
          float4 values[kAtOnce];
          CUTE_UNROLL
          for (int j = 0; j < kAtOnce; ++j) {
            const int64_t at = place(item.place_of(min(part + j, item.parts - 1)), row);
            sums[j] = __ldcg(p.sums + at);
            values[j] = __ldcg(reinterpret_cast<const float4*>(p.parts + at * kDim + column));
          }
          CUTE_UNROLL
          for (int j = 1; j < kAtOnce; ++j)
            if (part + j >= item.parts) sums[j].x = minus_infinity();
          total.add(sums, values);
        }
        finish(p, item, row, column, total, unit);
      }
    }
  }
};

// ---- Consumer: a warp has 16 rows of an item, and some keys of each tile ---------------------------
// Releases a stage that this warp has read by ld.shared. The proxy fence orders these generic reads before the writes
// of the next TMA load: without it TMA was seen to overwrite the end of a stage, where processes share a GPU in turns.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// Which slices of 16 keys a warp has of each tile.
struct KeySlices {
  uint32_t slices[kSlices];  // where its slices begin in a tile
  int first_key;             // the lane's first key in a tile

  __device__ __forceinline__ explicit KeySlices(int key_warp)
      : first_key(key_warp * kSlices * 16 + lane() % 4 * 2) {
    CUTE_UNROLL
    for (int i = 0; i < kSlices; ++i) slices[i] = Tile::slice(key_warp * kSlices + i);
  }
};

// One tile of keys. kMasked: there are some that not all rows see, and values that may be anything.
template <bool kMasked>
__device__ __forceinline__ void step(SharedStorage& shared, Position position, const KeySlices& own,
                                     const Queries& queries, const Scaling& scaling, Rows& rows, Outputs& outputs,
                                     int tile, int begin_key, int end_key) {
  Scores scores;
  const int key = tile * kKeys + own.first_key;
  shared.k_full[position.stage].wait(position.phase);
  const uint32_t k = cute::cast_smem_ptr_to_uint(shared.k[position.stage]) + key_place();
  CUTE_UNROLL
  for (int i = 0; i < kSlices; ++i) multiply_keys(scores[i], queries, k + own.slices[i]);
  release_read(shared.k_empty[position.stage]);
  if (kMasked) mask(scores, rows, key);
  softmax(scores, rows, outputs, scaling.exponent);
  shared.v_full[position.stage].wait(position.phase);
  const uint32_t v = cute::cast_smem_ptr_to_uint(shared.v[position.stage]) + value_place();
  CUTE_UNROLL
  for (int i = 0; i < kSlices; ++i) {
    uint32_t weights[4];
    Hidden hidden;
    CUTE_UNROLL
    for (int n = 0; n < 2; ++n) {
      weights[2 * n] = pair(scores[i][n][0], scores[i][n][1]);
      weights[2 * n + 1] = pair(scores[i][n][2], scores[i][n][3]);
      const int at = key + i * 16 + n * 8;
      hidden[n] = (at >= begin_key && at < end_key ? 0xffff : 0) |
                  (at + 1 >= begin_key && at + 1 < end_key ? 0xffff0000 : 0);
    }
    multiply_values<kMasked>(outputs, weights, v + own.slices[i], hidden);
  }
  release_read(shared.v_empty[position.stage]);
}

// Starts the loads of the lane's rows of an item.
__device__ __forceinline__ void load(const Parameters& p, Queries& queries, const Item& item, int first_row) {
  const Element* from[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const Row row = Row::at(p, item, first_row + 8 * r);
    from[r] = row.there(item) ? row.of_q(p, item) : nullptr;
  }
  queries.load(from);
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, TileScheduler& scheduler, int warp) {
  Position position{0, 0};
  const KeySlices own(warp % kKeyWarps);
  const int first_row = warp / kKeyWarps * 16 + lane() / 4;  // of a tile of rows, the lane's; the other is 8 below
  Item item;
  Queries queries;
  bool more = scheduler.next(p, item);
  if (more) load(p, queries, item, first_row);
  CUTE_NO_UNROLL
  while (more) {
    scheduler.share(item);  // while q is on its way
    Rows rows;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const Row row = Row::at(p, item, first_row + 8 * r);
      rows.begin[r] = item.sequence.begin(p, row.row);
      rows.end[r] = item.sequence.end(p, row.row);
      rows.maximum[r] = minus_infinity();
      rows.sum[r] = 0;
    }
    const Scaling scaling(p, item.head);
    Outputs outputs;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f)
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) outputs[f][i] = 0;

    const int begin_key = item.begin_key(p), end_key = item.end_key(p);  // that some row sees
    const int last_row = item.sequence.rows - 1;
    const int full_begin = item.sequence.begin(p, last_row), full_end = item.sequence.end(p, 0);  // that all rows see
    const int end = min(item.first + item.end, (end_key + kKeys - 1) / kKeys);
    CUTE_NO_UNROLL
    for (int tile = item.first + item.begin; tile < end; ++tile) {
      const bool full = tile * kKeys >= full_begin && tile * kKeys + kKeys <= full_end;
      if (full)
        step<false>(shared, position, own, queries, scaling, rows, outputs, tile, begin_key, end_key);
      else
        step<true>(shared, position, own, queries, scaling, rows, outputs, tile, begin_key, end_key);
      position.advance();
    }
    const Item done = item;
    more = scheduler.next(p, item);
    if (more) load(p, queries, item, first_row);  // on their way while what is done is stored
    Merge{p, shared, done, scaling.unit}.store(outputs, rows, scaling.exponent, warp);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_decode_sm90a_fp16_dim96_k_packed_q_packed_causal_32x128_stages4_1a0bd10e(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == kWarps * 32) {
    for (const auto* map : {&p.k_map, &p.v_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(1);  // the producer's arrival
      shared.v_full[stage].init(1);
      shared.k_empty[stage].init(kWarps);
      shared.v_empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  TileScheduler scheduler(p);
  __syncthreads();
  if (warp == kWarps) produce(p, shared, scheduler);
  else consume(p, shared, scheduler, warp);
}
