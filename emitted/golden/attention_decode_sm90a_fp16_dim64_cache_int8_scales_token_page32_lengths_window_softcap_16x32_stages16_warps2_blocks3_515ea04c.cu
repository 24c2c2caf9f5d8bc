// attention_decode_sm90a_fp16_dim64_cache_int8_scales_token_page32_lengths_window_softcap_16x32_stages16_warps2_blocks3_515ea04c
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = softcap tanh(scale q k^T / softcap), of few rows of q by long k and v
//   q fp16 fixed, k and v int8 in pages of 32, scales of each token, head dimension 64
//   mask window, lengths
//   16 rows of q by 32 keys, 2 warps of 16 rows, 16 stages
// Digest 515ea04c9ba096a9435d37063e37e2f1fe22d0160831b8d8696f3d5e5227fe77; `warploom show` prints this file.
//
// Launch: 96 threads, 3 CTAs per SM; grid: as many CTAs as all SMs hold
//   CTAs divide the tiles of keys of all sequences; partial results go through global
//   memory, and whichever CTA of a sequence and KV head comes last adds them up
// Warps 0 and 1, the consumers: mma.sync on 16 rows of q and 1/2 of the keys of a tile each
// Warp 2, the producer: its lanes issue the TMA loads of k and v
// Registers per thread: at most 168, for 3 CTAs of 96 threads per SM
//   A consumer thread needs about 110: 32 output, 16 of q, 62 scores and others
// Shared memory: 74496 bytes; the launch asks for 75520 of 232448
//   k, v         16 stages * 2 * 2048 = 65536
//   scales       16 stages * 256 = 4096
//   merged       2 warps * 16 rows * 32 columns * 4 = 4096
//   sums         2 warps * 16 rows * 8 = 256
//   full, empty  16 stages * 4 * 8 = 512
// Barriers        waited for by    guards                         a phase completes after
// k_full, v_full  consumers        a stage until it is filled     33 arrivals (32 of scales) and the bytes of TMA
// k_empty         the producer     k until the scores are there   2 arrivals: consumer warps
// v_empty         the producer     v until the output is there    2 arrivals: consumer warps
// named 1         all that arrive  outputs until they are summed  64 threads of consumers
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
constexpr int kDim = 64, kKvBytes = 1, kRowBytes = kDim * kKvBytes;
constexpr int kRows = 16, kKeys = 32;  // of a tile: rows of q, and of k and v
constexpr int kWarps = 2, kThreads = 96;  // consumer warps; threads, with those of the producer warp
constexpr int kRowWarps = kRows / 16, kKeyWarps = kWarps / kRowWarps;  // of other rows; of other keys of the same rows
constexpr int kSlices = kKeys / (16 * kKeyWarps);  // of 16 keys, a warp's in a tile
constexpr int kStages = 16;
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
  const int32_t* page_table;  // pages of each sequence
  const int32_t* lengths;  // keys of each sequence
  const float* scale_k;  // factors of k
  const float* scale_v;  // factors of v
  int64_t q_batch_stride;  // elements
  int64_t q_head_stride;  // elements
  int64_t q_row_stride;  // elements
  int64_t o_batch_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int64_t table_stride;  // from one sequence to the next
  int64_t scale_k_entry_stride;  // elements
  int64_t scale_k_head_stride;  // elements
  int64_t scale_k_row_stride;  // elements
  int64_t scale_v_entry_stride;  // elements
  int64_t scale_v_head_stride;  // elements
  int64_t scale_v_row_stride;  // elements
  int32_t seq_q;  // rows of a sequence
  int32_t part_rows;  // of a part
  int32_t batch;  // sequences
  int32_t kv_heads;  // of a sequence
  int32_t sharing;  // heads of one kv head
  int32_t row_tiles;  // of one kv head and sequence, at most
  int32_t seq_k;  // keys of a sequence, at most
  int32_t pages;  // of the cache
  int32_t right;  // nor one after its own + right
  int32_t left;  // a row sees no key before its own - left
  float scale;  // of dot products of q and k
  float softcap;  // that no score gets beyond
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, k_map) == 0 && OFFSET(Parameters, v_map) == 128);
static_assert(OFFSET(Parameters, q) == 256 && OFFSET(Parameters, o) == 264);
static_assert(OFFSET(Parameters, lse) == 272 && OFFSET(Parameters, parts) == 280);
static_assert(OFFSET(Parameters, sums) == 288 && OFFSET(Parameters, counters) == 296);
static_assert(OFFSET(Parameters, page_table) == 304 && OFFSET(Parameters, lengths) == 312);
static_assert(OFFSET(Parameters, scale_k) == 320 && OFFSET(Parameters, scale_v) == 328);
static_assert(OFFSET(Parameters, q_batch_stride) == 336 && OFFSET(Parameters, q_head_stride) == 344);
static_assert(OFFSET(Parameters, q_row_stride) == 352 && OFFSET(Parameters, o_batch_stride) == 360);
static_assert(OFFSET(Parameters, o_head_stride) == 368 && OFFSET(Parameters, o_row_stride) == 376);
static_assert(OFFSET(Parameters, table_stride) == 384 && OFFSET(Parameters, scale_k_entry_stride) == 392);
static_assert(OFFSET(Parameters, scale_k_head_stride) == 400 && OFFSET(Parameters, scale_k_row_stride) == 408);
static_assert(OFFSET(Parameters, scale_v_entry_stride) == 416 && OFFSET(Parameters, scale_v_head_stride) == 424);
static_assert(OFFSET(Parameters, scale_v_row_stride) == 432 && OFFSET(Parameters, seq_q) == 440);
static_assert(OFFSET(Parameters, part_rows) == 444 && OFFSET(Parameters, batch) == 448);
static_assert(OFFSET(Parameters, kv_heads) == 452 && OFFSET(Parameters, sharing) == 456);
static_assert(OFFSET(Parameters, row_tiles) == 460 && OFFSET(Parameters, seq_k) == 464);
static_assert(OFFSET(Parameters, pages) == 468 && OFFSET(Parameters, right) == 472);
static_assert(OFFSET(Parameters, left) == 476 && OFFSET(Parameters, scale) == 480);
static_assert(OFFSET(Parameters, softcap) == 484);

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
    return max(0, keys - rows + r - p.left);
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
  static constexpr int kBoxRows = 32, kBoxes = kKeys / kBoxRows;
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
  float k_scales[kStages][kKeys], v_scales[kStages][kKeys];
  FullBarrier k_full[kStages], v_full[kStages];
  EmptyBarrier k_empty[kStages], v_empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 75520);

// ---- Producer: one warp keeps the rings of k and v full -------------------------------------------
constexpr int kPage = 32;

// The pages of one sequence: a lane has one of 32 side by side, and one of the next 32.
struct Pages {
  const int32_t* table;
  int last;              // column of the table that keys may lie in
  int base, here, next;  // the column of lane 0, and pages

  __device__ __forceinline__ Pages(const Parameters& p, int batch, int first_key, int end_key)
      : table(p.page_table + batch * p.table_stride), last((end_key - 1) / kPage),
          base(first_key / kPage / 32 * 32) {
    here = load(p, base);
    next = load(p, base + 32);
  }
  // Page tables are unchecked, in GPU memory: a page is clamped to those of the cache.
  __device__ __forceinline__ int load(const Parameters& p, int column) const {
    return max(0, min(p.pages - 1, table[min(column + lane(), last)]));
  }
  // Of `column` and as many more as the lane is asked for, within 32 that are aligned.
  __device__ __forceinline__ int of(const Parameters& p, int column, int more) {
    if (column >= base + 32) {
      base += 32;
      here = next;
      next = load(p, base + 32);
    }
    return __shfl_sync(~0u, here, column - base + more);
  }
};

// Copies a factor, and has the barrier wait for it.
__device__ __forceinline__ void copy_scale(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_with_copies(FullBarrier& full) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cute::cast_smem_ptr_to_uint(reinterpret_cast<uint64_t*>(&full)))
               : "memory");
}

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
    Pages pages(p, item.batch, begin * kKeys, end_key);
    CUTE_NO_UNROLL
    for (int tile = begin; tile < end; ++tile) {
      const int key = tile * kKeys,
                boxes = min(Tile::kBoxes, (end_key - key + Tile::kBoxRows - 1) / Tile::kBoxRows);
      const Corner corner{key % kPage, pages.of(p, key / kPage, 0)};
      const int stage = position.stage;
      load(p.k_map, shared.k_full[stage], shared.k_empty[stage], position.phase, shared.k[stage], boxes,
           corner, item.head);
      load(p.v_map, shared.v_full[stage], shared.v_empty[stage], position.phase, shared.v[stage], boxes,
           corner, item.head);
      CUTE_UNROLL
      for (int i = 0; i < (kKeys + 31) / 32; ++i) {
        const int in_tile = i * 32 + lane();
        const int at = min(key + in_tile, end_key - 1);  // past the last key, that of the last: it is a number
        const int64_t row = at % kPage, entry = pages.of(p, key / kPage, (at - key) / kPage);
        if (in_tile >= kKeys) continue;
        const int64_t of_k = entry * p.scale_k_entry_stride + item.head * p.scale_k_head_stride +
            row * p.scale_k_row_stride;
        const int64_t of_v = entry * p.scale_v_entry_stride + item.head * p.scale_v_head_stride +
            row * p.scale_v_row_stride;
        copy_scale(&shared.k_scales[stage][in_tile], p.scale_k + of_k);
        copy_scale(&shared.v_scales[stage][in_tile], p.scale_v + of_v);
      }
      arrive_with_copies(shared.k_full[stage]);
      arrive_with_copies(shared.v_full[stage]);
      position.advance();
    }
  }
}

// ---- Scores, softmax and MMAs ---------------------------------------------------------------
// Subnormal operands count in full: what follows depends on it.
__device__ __forceinline__ uint32_t add_fp16(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Four bytes of b:a (0..3 are a's) by the nibbles of `choice`; 8 more is that byte's sign, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(choice));
  return d;
}

// int8 as fp16: exact. A byte of q + 128 under a byte of 0x64 is 1024 + 128 + q.
constexpr float kUnit = 1;  // that a code of 1 becomes is 1 / kUnit

// Two bytes of a word.
template <int kLow, int kHigh> __device__ __forceinline__ uint32_t decode(uint32_t word) {
  return add_fp16(permute(word ^ 0x80808080, 0x64646464, kLow | 4 << 4 | kHigh << 8 | 4 << 12), 0xe480e480);  // -1152
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
  float argument;  // of a product in the argument of tanh

  __device__ __forceinline__ Scaling(const Parameters& p, int head) {
    const float scale = p.scale * kUnit;
    unit = kUnit;
    exponent = p.softcap * kLog2E;
    argument = __fdividef(scale, p.softcap);
  }
  // The softmax is of softcap tanh(scale q k^T / softcap): what becomes of a score here is the tanh.
  __device__ __forceinline__ void cap(Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 8; ++i) {
      float& score = scores[i / 8][i / 4 % 2][i % 4];
      asm("tanh.approx.f32 %0, %1;" : "=f"(score) : "f"(score * argument));
    }
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
    const int begin = rows.begin[r] - key, end = rows.end[r] - key;
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 4; ++i) {
      const int place = i / 4 * 16 + i / 2 % 2 * 8 + i % 2;
      if (place >= end || place < begin) scores[i / 4][i / 2 % 2][2 * r + i % 2] = minus_infinity();
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

// Multiplies each key's scores, or weights, by its factor; the lane's first key has the first.
__device__ __forceinline__ void scale(Scores& scores, const float* factors) {
  CUTE_UNROLL
  for (int i = 0; i < kSlices * 2; ++i) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + i * 8);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) scores[i / 2][i % 2][j] *= j % 2 ? factor.y : factor.x;
  }
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
  scale(scores, shared.k_scales[position.stage] + own.first_key);
  release_read(shared.k_empty[position.stage]);
  scaling.cap(scores);
  if (kMasked) mask(scores, rows, key);
  softmax(scores, rows, outputs, scaling.exponent);
  shared.v_full[position.stage].wait(position.phase);
  scale(scores, shared.v_scales[position.stage] + own.first_key);
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
    if (kMasked) {  // a factor of a hidden key may be anything, too
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) weights[n] &= hidden[n / 2];
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

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    attention_decode_sm90a_fp16_dim64_cache_int8_scales_token_page32_lengths_window_softcap_16x32_stages16_warps2_blocks3_515ea04c(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == kWarps * 32) {
    for (const auto* map : {&p.k_map, &p.v_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(33);  // the producer's arrival, and lanes that copy scales
      shared.v_full[stage].init(33);
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
