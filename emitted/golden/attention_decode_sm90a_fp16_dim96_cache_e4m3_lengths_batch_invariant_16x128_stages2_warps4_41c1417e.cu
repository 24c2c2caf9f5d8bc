// attention_decode_sm90a_fp16_dim96_cache_e4m3_lengths_batch_invariant_16x128_stages2_warps4_41c1417e
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = scale q k^T, of few rows of q by long k and v
//   q fp16 fixed, k and v e4m3 fixed, head dimension 96
//   mask none, lengths, batch invariant
//   16 rows of q by 128 keys, 4 warps of 16 rows, 2 stages
// Digest 41c1417e1943d2a427a12869da1e8382683e9e7b84435aee01f2936ada9ef89e; `warploom show` prints this file.
//
// Launch: 160 threads, 1 CTA per SM; grid: as many CTAs as all SMs hold
//   CTAs divide the tiles of keys of all sequences; partial results go through global
//   memory, and whichever CTA of a sequence and KV head comes last adds them up
// Warps 0 to 3, the consumers: mma.sync on 16 rows of q and 1/4 of the keys of a tile each
// Warp 4, the producer: its lanes issue the TMA loads of k and v
// Registers per thread: at most 255, for 1 CTA of 160 threads per SM
//   A consumer thread needs about 146: 48 output, 24 of q, 74 scores and others
// Shared memory: 57920 bytes; the launch asks for 58944 of 232448
//   k, v         2 stages * 2 * 12288 = 49152
//   merged       4 warps * 16 rows * 32 columns * 4 = 8192
//   sums         4 warps * 16 rows * 8 = 512
//   full, empty  2 stages * 4 * 8 = 64
// Barriers        waited for by    guards                         a phase completes after
// k_full, v_full  consumers        a stage until it is filled     1 arrival and the bytes of TMA
// k_empty         the producer     k until the scores are there   4 arrivals: consumer warps
// v_empty         the producer     v until the output is there    4 arrivals: consumer warps
// named 1         all that arrive  outputs until they are summed  128 threads of consumers
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
constexpr int kDim = 96, kKvBytes = 1, kRowBytes = kDim * kKvBytes;
constexpr int kRows = 16, kKeys = 128;  // of a tile: rows of q, and of k and v
constexpr int kWarps = 4, kThreads = 160;  // consumer warps; threads, with those of the producer warp
constexpr int kRowWarps = kRows / 16, kKeyWarps = kWarps / kRowWarps;  // of other rows; of other keys of the same rows
constexpr int kSlices = kKeys / (16 * kKeyWarps);  // of 16 keys, a warp's in a tile
constexpr int kStages = 2;
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
  float* lse;  // [batch, heads, seq_q]
  float* parts;  // o of parts of items, unscaled: [place, row, dim]
  float2* sums;  // maximum and sum of their rows: [place, row]
  uint32_t* counters;  // parts of an item, by warps; 0 between launches
  const int32_t* lengths;  // keys of each sequence
  int64_t q_batch_stride;  // elements
  int64_t q_head_stride;  // elements
  int64_t q_row_stride;  // elements
  int64_t o_batch_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int32_t seq_q;  // rows of a sequence
  int32_t part_rows;  // of a part
  int32_t batch;  // sequences
  int32_t kv_heads;  // of a sequence
  int32_t sharing;  // heads of one kv head
  int32_t row_tiles;  // of one kv head and sequence, at most
  int32_t seq_k;  // keys of a sequence, at most
  int32_t chunks;  // places of an item
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, k_map) == 0 && OFFSET(Parameters, v_map) == 128);
static_assert(OFFSET(Parameters, q) == 256 && OFFSET(Parameters, o) == 264);
static_assert(OFFSET(Parameters, lse) == 272 && OFFSET(Parameters, parts) == 280);
static_assert(OFFSET(Parameters, sums) == 288 && OFFSET(Parameters, counters) == 296);
static_assert(OFFSET(Parameters, lengths) == 304 && OFFSET(Parameters, q_batch_stride) == 312);
static_assert(OFFSET(Parameters, q_head_stride) == 320 && OFFSET(Parameters, q_row_stride) == 328);
static_assert(OFFSET(Parameters, o_batch_stride) == 336 && OFFSET(Parameters, o_head_stride) == 344);
static_assert(OFFSET(Parameters, o_row_stride) == 352 && OFFSET(Parameters, seq_q) == 360);
static_assert(OFFSET(Parameters, part_rows) == 364 && OFFSET(Parameters, batch) == 368);
static_assert(OFFSET(Parameters, kv_heads) == 372 && OFFSET(Parameters, sharing) == 376);
static_assert(OFFSET(Parameters, row_tiles) == 380 && OFFSET(Parameters, seq_k) == 384);
static_assert(OFFSET(Parameters, chunks) == 388 && OFFSET(Parameters, scale) == 392);

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// ---- Which keys and rows ------------------------------------------------------------------------
// A sequence's rows of q and its keys.
struct Sequence {
  int rows, keys;

  __device__ __forceinline__ static Sequence at(const Parameters& p, int b) {
    Sequence found;
    found.rows = p.seq_q;
    found.keys = p.seq_k;
    found.keys = max(0, min(found.keys, p.lengths[b]));  // unchecked, in GPU memory
    return found;
  }

  // As lane `from` has it.
  __device__ __forceinline__ Sequence of_lane(int from) const {
    Sequence found;
    found.rows = __shfl_sync(~0u, rows, from);
    found.keys = __shfl_sync(~0u, keys, from);
    return found;
  }

  // Row r stands at key keys - rows + r: what it sees is [begin(r), end(r)).
  __device__ __forceinline__ int begin(const Parameters& p, int r) const {
    return 0;
  }
  __device__ __forceinline__ int end(const Parameters& p, int r) const {
    return keys;
  }

  // Tiles of keys that some row sees: `count` from the one numbered `first` on.
  struct Tiles { int first, count; };
  __device__ __forceinline__ Tiles tiles(const Parameters& p) const {
    const int first = begin(p, 0) / kKeys;
    return {first, max(0, (end(p, rows - 1) + kKeys - 1) / kKeys - first)};
  }
  __device__ __forceinline__ int row_tiles(const Parameters& p) const {
    return p.row_tiles;
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

// An item is a tile of rows of one sequence and KV head, and this CTA's chunks of its keys, up to tile `end` of
// those that some row sees. The result of each chunk is a partial one, where there are several.
struct Item {
  Sequence sequence;
  int batch, head, row_tile;
  int end;
  int chunk, here;  // the number of the next chunk; how many the CTA has done

  __device__ __forceinline__ int begin_key(const Parameters& p) const { return sequence.begin(p, 0); }
  __device__ __forceinline__ int end_key(const Parameters& p) const { return sequence.end(p, sequence.rows - 1); }
  __device__ __forceinline__ int number(const Parameters& p) const {
    return (batch * p.kv_heads + head) * p.row_tiles + row_tile;
  }
  // An item is cut by its own length alone, in equal chunks: of how many tiles.
  __device__ __forceinline__ int each(const Parameters& p) const {
    const int weight = sequence.weight(p);
    constexpr int kWhole = 4, kLeast = 4, kLong = 8;
    constexpr int kFew = 8, kMost = 16;
    if (weight <= kWhole) return weight;
    return max(max(kLeast, min(kLong, (weight + kFew - 1) / kFew)), (weight + kMost - 1) / kMost);
  }
  __device__ __forceinline__ int parts(const Parameters& p) const { return quotient(sequence.weight(p) + each(p) - 1, each(p)); }
  // Whether the CTA has done all chunks before the next one.
  __device__ __forceinline__ bool from_first() const { return chunk == here; }
  // Whether the next chunk is the CTA's last; and whether the CTA has the whole item then.
  __device__ __forceinline__ bool last(const Parameters& p) const { return (chunk + 1) * each(p) >= end; }
  __device__ __forceinline__ bool whole(const Parameters& p) const {
    return from_first() && (chunk + 1) * each(p) >= sequence.weight(p);
  }
  __device__ __forceinline__ int first(const Parameters& p) const { return sequence.tiles(p).first; }
  __device__ __forceinline__ int chunk_begin(const Parameters& p) const { return chunk * each(p); }
  __device__ __forceinline__ int chunk_end(const Parameters& p) const { return min((chunk + 1) * each(p), end); }
  // Whether the CTA has another chunk of the item, to which this goes.
  __device__ __forceinline__ bool to_next_chunk(const Parameters& p) {
    ++here, ++chunk;
    return chunk_begin(p) < end;
  }
};

// The same number, of which the compiler does not know that: else it keeps what is made of it, for an item's
// end, ready in registers from the kernel's start.
__device__ __forceinline__ int as_new(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// How many chunks an item is of, that begins at tile `start`; and how many of these the CTA does that has the
// first, and has added up where all are left.
struct Sharing {
  int parts, added;

  __device__ __forceinline__ Sharing(const Parameters& p, Division division, const Item& item, int start)
      : parts(item.parts(p)) {
    division.each = as_new(division.each);
    const int stop = division.begin(division.owner(start) + 1) - start, each = item.each(p);
    added = quotient(min(item.sequence.weight(p), stop) + each - 1, each);
  }
};

// Goes through a CTA's range of tiles: it has the chunks that begin there.
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
    const int weight = item.sequence.weight(p), row_tiles = item.sequence.row_tiles(p);
    const int start = __shfl_sync(~0u, through, from) - weight * row_tiles * p.kv_heads;
    const int index = quotient(at - start, weight);
    item.head = index;
    if (row_tiles > 1) item.head = quotient(index, row_tiles);
    item.row_tile = index - item.head * row_tiles;
    return start + index * weight;
  }

  // All chunks of an item that begin in the CTA's range.
  __device__ __forceinline__ bool next(const Parameters& p, Item& item) {
    while (at < stop) {
      const int start = locate(p, item), weight = item.sequence.weight(p), each = item.each(p);
      item.chunk = quotient(at - start + each - 1, each);  // the first one that begins there
      item.here = 0;
      item.end = min(weight, quotient(min(weight, stop - start) + each - 1, each) * each);
      at = start + item.end;
      if (item.chunk * each < item.end) return true;
      at = start + weight;
    }
    return false;
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
  static constexpr int kSpan = 32, kPieces = kRowBytes / kSpan;
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
static_assert(sizeof(SharedStorage) <= 58944);

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
    const int begin = item.first(p) + item.chunk_begin(p), end = min(item.first(p) + item.end, (end_key + kKeys - 1) / kKeys);
    if (begin >= end) continue;  // no row of the item sees a key
    CUTE_NO_UNROLL
    for (int tile = begin; tile < end; ++tile) {
      const int key = tile * kKeys,
                boxes = min(Tile::kBoxes, (end_key - key + Tile::kBoxRows - 1) / Tile::kBoxRows);
      const Corner corner{key + lane() * Tile::kBoxRows, item.batch};
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
// Subnormal operands count in full: what follows depends on it.
// Two e4m3, those of one half of `bytes`, as fp16.
__device__ __forceinline__ uint32_t fp16_of_e4m3(uint32_t bytes, int half) {
  uint32_t d;
  if (half)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(d) : "r"(bytes));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(d) : "r"(bytes));
  return d;
}
// Four bytes of b:a (0..3 are a's) by the nibbles of `choice`; 8 more is that byte's sign, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(choice));
  return d;
}

// e4m3 as fp16: exact; the SM converts two at a time.
constexpr float kUnit = 1;  // that a code of 1 becomes is 1 / kUnit

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  if (kHigh == kLow + 1) return fp16_of_e4m3(word, kLow / 2);
  return fp16_of_e4m3(permute(word, 0, kLow | kHigh << 4), 0);
}

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

// A read gives a lane four bytes side by side of a key: columns 4 (l % 4) to the third after, where the product
// has columns 2 (l % 4) and the next, and 8 to the right. The order of columns is free, where q's is the same.
struct Queries {
  uint32_t a[kSteps][4];

  __device__ __forceinline__ void load(const Element* const (&rows)[2]) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int column = step * 16 + lane() % 4 * 4;
        const uint2 found = rows[r] ? *reinterpret_cast<const uint2*>(rows[r] + column) : uint2{0, 0};
        a[step][r] = found.x;
        a[step][r + 2] = found.y;
      }
    }
  }
};

constexpr int kReads = kRowBytes / 32;  // of 16 rows: each has 32 bytes of them

// What a lane reads of a slice, of k as of v: rows first, so that a read has 32 columns of all 16.
__device__ __forceinline__ int key_place() { return Tile::place(lane() % 16, lane() / 16); }
__device__ __forceinline__ int value_place() { return key_place(); }

__device__ __forceinline__ void multiply_keys(float (&scores)[2][4], const Queries& queries, uint32_t from) {
  CUTE_UNROLL
  for (int n = 0; n < 2; ++n)
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
  CUTE_UNROLL
  for (int at = 0; at < kReads; ++at) {
    uint32_t keys[4];
    read(keys, Tile::moved(from, at));
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      multiply(scores[i % 2], queries.a[2 * at + i / 2], decode<0, 1>(keys[i]), decode<2, 3>(keys[i]));
  }
}

// Columns 2 (l / 4) and the next lie side by side: one product has the even ones of 16, the next the odd ones.
template <bool kMasked>
__device__ __forceinline__ void multiply_values(Outputs& outputs, const uint32_t (&weights)[4], uint32_t from,
                                                const Hidden& hidden) {
  CUTE_UNROLL
  for (int at = 0; at < kReads; ++at) {
    uint32_t values[4];
    read_transposed(values, Tile::moved(from, at));
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t even[2], odd[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        even[i] = decode<0, 2>(values[2 * half + i]);
        odd[i] = decode<1, 3>(values[2 * half + i]);
        if (kMasked) even[i] &= hidden[i], odd[i] &= hidden[i];
      }
      multiply(outputs[4 * at + 2 * half], weights, even[0], even[1]);
      multiply(outputs[4 * at + 2 * half + 1], weights, odd[0], odd[1]);
    }
  }
}

// Leaves `kMerged` columns of the warp's rows, numbered `part`, in order.
__device__ __forceinline__ void leave(float (&to)[16][kMerged], const Outputs& outputs, int part) {
  CUTE_UNROLL
  for (int f = 0; f < kMerged / 8; f += 2) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane() / 4, first = part * (kMerged / 8) + f;
      const float *const even = outputs[first] + 2 * r, *const odd = outputs[first + 1] + 2 * r;
      *reinterpret_cast<float4*>(&to[row][merged_column(row, f * 8 + lane() % 4 * 4)]) =
          {even[0], odd[0], even[1], odd[1]};
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
  __device__ __forceinline__ int64_t in(const Item& item, int64_t batch_stride, int64_t head_stride,
                                        int64_t row_stride) const {
    return item.batch * batch_stride + head * head_stride + row * row_stride;
  }
  __device__ __forceinline__ const Element* of_q(const Parameters& p, const Item& item) const {
    return p.q + in(item, p.q_batch_stride, p.q_head_stride, p.q_row_stride);
  }
  __device__ __forceinline__ Element* of_o(const Parameters& p, const Item& item) const {
    return p.o + in(item, p.o_batch_stride, p.o_head_stride, p.o_row_stride);
  }
  __device__ __forceinline__ float* of_lse(const Parameters& p, const Item& item) const {
    return p.lse + in(item, int64_t(p.kv_heads) * p.sharing * p.seq_q, p.seq_q, 1);
  }
};

// Rows of an item that are there.
__device__ __forceinline__ int rows_there(const Parameters& p, const Item& item) {
  return min(kRows, item.sequence.rows * p.sharing - item.row_tile * kRows);
}

__device__ __forceinline__ float4 appended(const float4& x, float before, float factor, const float4& y) {
  return {__fmaf_rn(x.x, before, __fmul_rn(factor, y.x)), __fmaf_rn(x.y, before, __fmul_rn(factor, y.y)),
          __fmaf_rn(x.z, before, __fmul_rn(factor, y.z)), __fmaf_rn(x.w, before, __fmul_rn(factor, y.w))};
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
  __device__ __forceinline__ Total(const float2& sums, const float4& values) : maximum(sums.x), sum(sums.y),
      value(values) {}

  // Adds one more, which comes after all that are in it. Where sums are rounded is said, since it is done in
  // two places.
  __device__ __forceinline__ void append(const float2& sums, const float4& values) {
    const float grown = fmaxf(maximum, sums.x), reference = grown == minus_infinity() ? 0 : grown;
    const float before = fast_exp2(maximum - reference), factor = fast_exp2(sums.x - reference);
    sum = __fmaf_rn(sum, before, __fmul_rn(factor, sums.y));
    value = appended(value, before, factor, values);
    maximum = grown;
  }
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    // And 0: which 0 it is depends on whether what is not there was added.
    value = {__fmaf_rn(value.x, factor, 0.f), __fmaf_rn(value.y, factor, 0.f), __fmaf_rn(value.z, factor, 0.f),
             __fmaf_rn(value.w, factor, 0.f)};
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
__device__ __forceinline__ uint32_t count_up(uint32_t* counter, int by) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}

// Starts a load from L2 of part `at` of those that are `apart` bytes from each other; 0 where there are no more
// than that. Addresses are made here: else the compiler has all of them ready from the kernel's start.
__device__ __forceinline__ void read_part(float4& found, const float* from, int apart, int at, int there) {
  asm volatile("{.reg .pred is; .reg .u64 place; setp.lt.s32 is, %6, %7; mad.wide.s32 place, %6, %5, %4;\n"
               "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
               "@is ld.global.cg.v4.f32 { %0, %1, %2, %3}, [place];}"
               : "=&f"(found.x), "=&f"(found.y), "=&f"(found.z), "=&f"(found.w)
               : "l"(from), "r"(apart), "r"(at), "r"(there));
}

// The largest of what the lane, numbered `which` of `kLanes` side by side, and those before it have.
template <int kLanes> __device__ __forceinline__ float largest_up_to(int which, float x) {
  CUTE_UNROLL
  for (int by = 1; by < kLanes; by *= 2) {
    const float less = __shfl_up_sync(~0u, x, by);
    if (which >= by) x = fmaxf(x, less);
  }
  return x;
}

// Warps that have other keys of the same rows add up what they have, and so do CTAs that have a part of an item
// each: always in the same order.
struct Merge {
  static constexpr int kFours = kMerged / 4, kRowsAtOnce = 32 / kFours;  // of a row; of a warp
  static constexpr int kNext = kWarps * kRowsAtOnce;  // from a warp's rows to its next ones
  const Parameters& p;
  SharedStorage& shared;
  const Item& item;
  float unit;
  const Division& division;
  int start;                                       // the item's first tile, of those of all items
  bool adds = item.from_first() && item.here > 0;  // this chunk to those before it, where all are the CTA's
  int here = item.here + 1;  // chunks of the item that the CTA has done, with this one
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
      if (there <= kNext) add_warps<1>(warp, part);
      else add_warps<2>(warp, part);
    }
    if (!item.last(p) || item.whole(p) || warp * kRowsAtOnce >= there) return;
    const Sharing sharing(p, division, item, start);  // while what was left is on its way
    if (!last_to_leave(warp, sharing.parts)) return;
    if (there <= kNext) combine<1>(sharing);
    else combine<4 / kRowsAtOnce>(sharing);
  }

  // Adds up some columns of the warp's rows, of so many steps from row to row at a time.
  template <int kSteps> __device__ __forceinline__ void add_warps(int warp, int part) const {
    const int four = lane() % kFours, column = part * kMerged + four * 4;
    CUTE_NO_UNROLL
    for (int first = warp * kRowsAtOnce + lane() / kFours; first < there; first += kSteps * kNext) {
      Total totals[kSteps];
      Total before[kSteps];  // of the chunks before, which the CTA left
      if (adds) {
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) before[i] = left_before(min(first + i * kNext, there - 1), column);
      }
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) totals[i] = of_warps(shared, first + i * kNext, four);
      if (adds) {
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          before[i].append({totals[i].maximum, totals[i].sum}, totals[i].value);
          totals[i] = before[i];
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        const int row = first + i * kNext;
        if (row >= there) continue;
        if (item.whole(p)) finish(p, item, row, column, totals[i], unit);
        else leave_part(row, column, totals[i]);
      }
    }
  }

  __device__ __forceinline__ int64_t place(int place, int row) const { return int64_t(place) * p.part_rows + row; }
  __device__ __forceinline__ int64_t place_of(int chunk, int row) const { return place(item.number(p) * p.chunks + chunk, row); }

  __device__ __forceinline__ void leave_part(int row, int column, const Total& total) const {
    const int64_t at = place_of(item.chunk, row);
    const int64_t values = adds ? place_of(0, row) : at;
    *reinterpret_cast<float4*>(p.parts + values * kDim + column) = total.value;
    if (column == 0) p.sums[at] = {total.maximum, total.sum};
  }

  __device__ __forceinline__ Total left_before(int row, int column) const {
    const int64_t values = place_of(0, row) * kDim + column;
    return {p.sums[place_of(item.chunk - 1, row)], *reinterpret_cast<const float4*>(p.parts + values)};
  }

  __device__ __forceinline__ bool last_to_leave(int warp, int parts) const {
    uint32_t before = 0;
    __syncwarp();
    if (lane() == 0) {
      uint32_t* const counter = p.counters + item.number(p) * kWarps + warp;
      before = count_up(counter, here);
      if (before + here == parts) *counter = 0;  // as the next launch must find it
    }
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();
    return before + here == parts;
  }

  // Adds up all chunks of the warp's rows in their order, of so many steps from row to row at a time: those
  // that one CTA did from the first on have been, and lie where the first one does. From L2, where they were
  // left; much of it is on its way together: eight chunks of these rows, whose maxima and sums the lanes have,
  // each that of one row and chunk.
  template <int kSteps> __device__ __forceinline__ void combine(const Sharing& sharing) const {
    constexpr int kParts = 8;
    const int self = as_new(lane()), own = self / kParts, which = self % kParts, lane_row = self / kFours;
    const int own_row = own / kRowsAtOnce * kNext + own % kRowsAtOnce;
    const int apart = as_new(p.part_rows);  // rows, from a chunk to the next
    CUTE_NO_UNROLL
    for (int columns = 0; columns < kDim; columns += kMerged) {
      const int column = columns + self % kFours * 4;
      CUTE_NO_UNROLL
      for (int begin = threadIdx.x / 32 * kRowsAtOnce; begin < there; begin += kSteps * kNext) {
        const int summed = min(begin + own_row, there - 1);  // the row that the lane has sums of
        const float2* const sums = p.sums + place_of(0, summed);
        const float* from[kSteps];
        float4 values[kSteps];
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          from[i] = p.parts + place_of(0, min(begin + i * kNext + lane_row, there - 1)) * kDim + column;
          values[i] = __ldcg(reinterpret_cast<const float4*>(from[i]));
        }
        float2 total = __ldcg(sums + (sharing.added - 1) * apart);  // maximum and sum
        CUTE_NO_UNROLL
        for (int part = sharing.added; part < sharing.parts; part += kParts) {
          const int left = sharing.parts - part;
          const float2 has = which < left ? __ldcg(sums + (part + which) * apart) : float2{minus_infinity(), 0};
          float4 found[kSteps][kParts];
          CUTE_UNROLL
          for (int i = 0; i < kSteps; ++i)
            CUTE_UNROLL
            for (int j = 0; j < kParts; ++j)
              read_part(found[i][j], from[i], apart * kDim * 4, part + j, sharing.parts);
          // Of the maximum of all up to the lane's chunk, and of all before that.
          const float grown = largest_up_to<kParts>(which, fmaxf(total.x, has.x));
          const float lower = __shfl_up_sync(~0u, grown, 1), reference = grown == minus_infinity() ? 0 : grown;
          const float before = fast_exp2((which == 0 ? total.x : lower) - reference),
                      factor = fast_exp2(has.x - reference);
          const float sum = __fmul_rn(factor, has.y);
          CUTE_UNROLL
          for (int j = 0; j < kParts; ++j) {
            const int lane_of_own = own * kParts + j;
            total.y = __fmaf_rn(total.y, __shfl_sync(~0u, before, lane_of_own),
                                __shfl_sync(~0u, sum, lane_of_own));
            CUTE_UNROLL
            for (int i = 0; i < kSteps; ++i) {
              const int of = (i * kRowsAtOnce + lane_row) * kParts + j;
              values[i] = appended(values[i], __shfl_sync(~0u, before, of), __shfl_sync(~0u, factor, of),
                                   found[i][j]);
            }
          }
          total.x = __shfl_sync(~0u, grown, own * kParts + kParts - 1);
        }
        CUTE_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          const int of = (i * kRowsAtOnce + lane_row) * kParts, row = begin + i * kNext + lane_row;
          const Total all({__shfl_sync(~0u, total.x, of), __shfl_sync(~0u, total.y, of)}, values[i]);
          if (row < there) finish(p, item, row, column, all, unit);
        }
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
    const int end = min(item.first(p) + item.chunk_end(p), (end_key + kKeys - 1) / kKeys);
    CUTE_NO_UNROLL
    for (int tile = item.first(p) + item.chunk_begin(p); tile < end; ++tile) {
      const bool full = tile * kKeys >= full_begin && tile * kKeys + kKeys <= full_end;
      if (full)
        step<false>(shared, position, own, queries, scaling, rows, outputs, tile, begin_key, end_key);
      else
        step<true>(shared, position, own, queries, scaling, rows, outputs, tile, begin_key, end_key);
      position.advance();
    }
    const Item done = item;
    const int start = scheduler.at - done.end;
    if (!item.to_next_chunk(p)) {
      more = scheduler.next(p, item);
      if (more) load(p, queries, item, first_row);  // on their way while what is done is stored
    }
    Merge{p, shared, done, scaling.unit, scheduler.division, start}.store(outputs, rows, scaling.exponent, warp);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_decode_sm90a_fp16_dim96_cache_e4m3_lengths_batch_invariant_16x128_stages2_warps4_41c1417e(const __grid_constant__ Parameters p) {
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
