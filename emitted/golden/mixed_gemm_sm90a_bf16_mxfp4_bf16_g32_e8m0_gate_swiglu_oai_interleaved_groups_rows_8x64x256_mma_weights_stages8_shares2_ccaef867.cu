// mixed_gemm_sm90a_bf16_mxfp4_bf16_g32_e8m0_gate_swiglu_oai_interleaved_groups_rows_8x64x256_mma_weights_stages8_shares2_ccaef867
//
// D[m, n] = epilogue(A[m, k] W[n, k]): gate_swiglu_oai_interleaved
//   A bf16, W mxfp4 with scales e8m0 of groups of 32, applied to weights, accumulated in fp32, D bf16 row
//   tile 8x64x256 by mma, 2 consumers, of which 2 share k, 8 stages, along_n, swizzle 8, store direct
//   computed as D' = W A': rows of the tensor core's tile are rows of W, columns of D
//   rows of A and D in groups that end at offsets in device memory, and a W for each
// Digest ccaef867d2b2bfe1dc18e33999dedcad14e4e0a0d968c9268ff0bed16558ce8a; `warploom show` prints this file.
//
// Warps 0 to 7, 2 consumers of 4 warps: mma on 64 dequantized rows of W and 1/2 of k, then the epilogue.
// Warps 8 and 9, the producer: one thread copies slabs of W, one loads A.
// Registers per thread: at most 168, for 1 CTA of 320 threads per SM.
//   A consumer thread has 4 accumulators; the epilogue takes 8 columns at once.
// Shared memory: 112776 bytes; the launch asks for 113664 of 232448
//   a            8 stages * 4 panels * 1024 = 32768
//   b            8 stages * 2 slabs * 4352 = 69632
//   shared_sums  2 consumers * 1 other * 1024 = 2048
//   groups       2050 integers * 4 = 8200
//   full, empty  8 stages * 2 * 8 = 128
// Barriers    waited for by    guards                       a phase completes after
// full        consumers        a stage until it is filled   2 arrivals and the stage's bytes
// empty       the producer     a stage while it is read     8 arrivals: every consumer warp
// named 1 on  all that arrive  the reduction                256 threads with the same rows
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
using ElementD = cutlass::bfloat16_t; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 8, kTileN = 64, kTileK = 256;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 1, kClusterSize = kSplit;  // CTAs of a cluster that split a tile's k
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kShares = 2;     // consumers that split the k of a stage by slabs
constexpr int kSharing = kConsumers / kShares;  // consumers that split the rows of a tile
constexpr int kWarps = kConsumers * 4, kThreads = 320;  // consumer warps; then the producer's
constexpr int kStages = 8;
constexpr int kSwizzle = 8;  // columns of tiles in a band of the tile scheduler
constexpr int kRows = kTileN, kColumns = kTileM;  // of a tile, as mma sees it: its rows are n
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 8;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Accumulators = Accumulator[kBlocks][kCount];

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  const uint8_t* b;  // W, in slabs
  cutlass::bfloat16_t* d;  // D[m][pitch]
  const int* offsets;  // where each group of rows ends
  int64_t d_pitch;  // elements between rows of D
  int32_t m;  // rows of D
  int32_t n;  // columns of gate and up, twice those of D
  int32_t k;  // columns of A, rows of B
  int32_t batches;  // groups
  int32_t row_blocks;  // of 64 rows of W
  int32_t slabs;  // of k, in each of them
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, b) == 128);
static_assert(OFFSET(Parameters, d) == 136 && OFFSET(Parameters, offsets) == 144);
static_assert(OFFSET(Parameters, d_pitch) == 152 && OFFSET(Parameters, m) == 160);
static_assert(OFFSET(Parameters, n) == 164 && OFFSET(Parameters, k) == 168);
static_assert(OFFSET(Parameters, batches) == 172 && OFFSET(Parameters, row_blocks) == 176);
static_assert(OFFSET(Parameters, slabs) == 180);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 1024;  // of one stage

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, m);
  }
};

// W is stored in slabs of 64 rows by 128 k: 4096 bytes of codes, in the order in which threads hold wgmma's A
// operand (16 bytes a thread, 2048 a piece), then the scales of its groups, those of rows r and r + 8 adjacent.
struct Slab {
  static constexpr int kBytes = 4352, kDepth = 128;
  static constexpr int kPieceBytes = 2048;
  static constexpr int kSteps = kDepth / 16;  // of k, one for each mma
  static constexpr int kWords = 1;  // of a thread, in one step
  static constexpr int kScales = 4096;
  static constexpr int kGroups = 4;
  static constexpr int kOfStage = kTileK / kDepth;  // along k
  static constexpr int kStageBytes = 2 * kBytes;

  // Bulk copy of the slabs of 64 rows; weights are read once, so L2 evicts them first.
  __device__ __forceinline__ static void load(FullBarrier& full, uint8_t* to, const uint8_t* from, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&full)),
          "l"(kEvictFirst)
        : "memory");
  }
};

// A stage has A in panels of as much k as one TMA box.
constexpr int kPanels = 4, kPanelK = kTileK / kPanels, kSlabPanels = kPanels / Slab::kOfStage;
constexpr int kOfPanel = Slab::kSteps / kSlabPanels;  // steps

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

// A tile of D.
struct TileCoord {
  int m, n;  // the row and the column of its first element
  int batch, m_end;  // its group, and the row that this ends before
};

__device__ __forceinline__ int k_tiles(const Parameters& p) { return (p.k + kTileK - 1) / kTileK; }

// A unit of work: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
};

// A persistent CTA takes every gridDim.x-th tile.
struct Walk {
  int tile, tiles, clusters, k_tiles;

  __device__ __forceinline__ Walk(const Parameters&, int tiles, int k_tiles, int cluster, int clusters)
      : tile(cluster), tiles(tiles), clusters(clusters), k_tiles(k_tiles) {}

  __device__ __forceinline__ bool next(Unit& unit) {
    unit = {tile, 0, k_tiles};
    tile += clusters;
    return unit.tile < tiles;
  }
};

// Where each group of rows ends, and how many tiles come before that: filled once a launch, in shared memory.
struct GroupTable {
  static constexpr int kMost = 1024, kRowsOfTile = kTileM * kClusterM;
  int ends[kMost + 1], tiles[kMost + 1];  // of group g at g + 1; tiles along m, counted in clusters

  // All threads copy the offsets, then one warp adds up. An offset below the one before it counts as that, and
  // one past the last row as the last row: no tile has a row outside of D.
  __device__ __forceinline__ void fill(const Parameters& p) {
    for (int group = threadIdx.x; group < p.batches; group += blockDim.x)
      ends[group + 1] = max(0, min(p.offsets[group], p.m));
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // Each lane has some consecutive groups; scans over lanes find the row at which these begin, and add up the
    // tiles before them.
    const int lane = threadIdx.x, each = (p.batches + 31) / 32;
    const int first = min(lane * each, p.batches), last = min(first + each, p.batches);
    int largest = 0;
    for (int group = first; group < last; ++group) largest = max(largest, ends[group + 1]);
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, largest, apart);
      if (lane >= apart) largest = max(largest, other);
    }
    int start = __shfl_up_sync(~0u, largest, 1);
    if (lane == 0) start = 0;
    int count = 0;
    for (int group = first, begin = start; group < last; ++group) {
      const int end = max(begin, ends[group + 1]);
      count += tiles_of(end - begin);
      begin = end;
    }
    const int own = count;
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, count, apart);
      if (lane >= apart) count += other;
    }
    count -= own;
    for (int group = first; group < last; ++group) {
      const int end = max(start, ends[group + 1]);
      count += tiles_of(end - start);
      ends[group + 1] = start = end;
      tiles[group + 1] = count;
    }
    if (lane == 0) ends[0] = tiles[0] = 0;
  }

  __device__ __forceinline__ static int tiles_of(int rows) { return (rows + kRowsOfTile - 1) / kRowsOfTile; }
};

// The tile scheduler: the tiles of one group after the other, in bands. Groups without rows have no tile.
struct GroupedTiles {
  const GroupTable& table;
  const int groups, columns;  // of tiles, in clusters

  __device__ __forceinline__ GroupedTiles(const Parameters& p, const GroupTable& table)
      : table(table), groups(p.batches), 
        columns((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)) {}

  __device__ __forceinline__ int count() const { return table.tiles[groups] * columns; }

  // The tile of the CTA with this rank.
  __device__ __forceinline__ TileCoord at(int index, int rank) const {
    const int tiles_row = index / columns;
    int group = 0, past = groups;  // the last group that begins at this row of tiles or before it
    while (past - group > 1) {
      const int middle = (group + past) / 2;
      if (table.tiles[middle] <= tiles_row) group = middle;
      else past = middle;
    }
    const int before = table.tiles[group], rows = table.tiles[group + 1] - before;
    index -= before * columns;
    // Tiles are taken in bands of kSwizzle columns, each row by row, so that the operands of tiles in flight
    // stay in L2. In a band of 2 columns the order is 0 1 over 2 3 over 4 5.
    const int band = index / (kSwizzle * rows);
    const int width = min(columns - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * rows;
    const int column = band * kSwizzle + offset % width, row = offset / width;
    return {table.ends[group] + (row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN, group, table.ends[group + 1]};
  }
};

// The rows and columns of D that a thread's fragment of 2 x 2 accumulators has. Epilogue and store see
// accumulators by these alone, never by wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

// Rows of gate and up take turns in wgmma's 16 rows of a warp, rows r and r + 8 of a thread being of the same kind.
// `pair_gate_with_up` gives it both for one column of D. Places in a tile count both; coordinates in D do not.

// Coordinates of fragment f of a chunk of the consumer's part of the tile, which starts at `at`: the MMA gives
// lane l the rows l / 4 and l / 4 + 8 of its warp's 16, and the columns 2 (l % 4) and 2 (l % 4) + 1 of every 8.
// Its rows are columns of D here.
__device__ __forceinline__ Coordinates coordinates(const TileCoord& at, int chunk, int f) {
  const int lane = threadIdx.x % 32;
  const int row = (at.n + chunk / kChunks * kWgmmaM) / 2 + threadIdx.x / 32 % 4 * 8 + lane / 8 + lane / 4 % 2 * 4;
  const int column = at.m + chunk % kChunks * kChunkColumns + f * 8 + lane % 4 * 2;
  return { {column, column + 1}, {row, 0x7fffffff} };  // the second is past the end: the gate leaves one column
}

// Turns sums of rows r and r + 8 into gate and up of one column of D, for two rows of D: lanes with an even r keep
// gate of r and get up of r + 1; those with an odd one get gate of r + 7, and keep up of r + 8.
__device__ __forceinline__ void pair_gate_with_up(float (&x)[2][2]) {
  const bool odd = threadIdx.x / 4 % 2 != 0;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(~0u, odd ? x[i][0] : x[i][1], 4);
    if (odd) x[i][0] = other;
    else x[i][1] = other;
  }
}

// 1 / (1 + 2^-x) by the two fast units; exact limits at both infinities, NaN stays NaN.
__device__ __forceinline__ float logistic2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

// g / (1 + exp(-1.702 g)) with g = min(x, 7), as gpt-oss has it. NaN stays NaN.
struct SwigluOai {
  __device__ __forceinline__ static float function(float x) {
    const float gate = x > 7.f ? 7.f : x;
    return gate * logistic2(1.702f * 1.44269504f * gate);
  }
};

// The factor of up, min(max(x, -7), 7) + 1. NaN stays NaN.
struct SwigluOaiUp {
  __device__ __forceinline__ static float function(float x) {
    return (x > 7.f ? 7.f : x < -7.f ? -7.f : x) + 1.f;
  }
};

// Multiplies a function of the gate by up, which a thread has for the same columns of D.
template <class Function, class Factor> struct Gate {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      x[i][0] = Function::function(x[i][0]) * Factor::function(x[i][1]);
      x[i][1] = 0.f;
    }
  }
};

// The steps from accumulators to D, in order.
struct Epilogue {
  Gate<SwigluOai, SwigluOaiUp> step_0;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p, int batch)
      : step_0{} {}

  __device__ __forceinline__ void apply(Value (&x)[2][2]) {
    step_0.apply(x);
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Converts two adjacent values of a row to D's type, rounded to nearest even.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x[1]), "f"(x[0]));
  return reinterpret_cast<const Pair&>(bits);
}

// Stores D from registers, predicated: for row strides and addresses that TMA cannot write.
struct Store {
  // Stores a chunk; the consumer's part of the tile starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const TileCoord& at, int chunk) {
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const Coordinates place = coordinates(at, chunk, f);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (place.row[i] >= at.m_end) continue;
        ElementD* row = p.d + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n / 2) row[place.column[j]] = pair.value[j];
      }
    }
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][kPanels * OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(128) uint8_t b[kStages][Slab::kStageBytes];
  alignas(16) uint8_t shared_sums[2048];  // of other consumers
  GroupTable groups;
  FullBarrier full[kStages];    // the bytes of both producers have arrived
  EmptyBarrier empty[kStages];  // every consumer warp has read the stage
};
static_assert(sizeof(SharedStorage) <= 113664);

// Four accumulators of a thread, in 64 rows by 8 columns: what one access moves.
struct alignas(16) Fragment { Accumulator value[4]; };

constexpr int kAcross = kColumns / 8, kAll = kBlocks * kAcross;  // fragments of a thread in 64 rows, and in all

// The reduction of a tile whose k several consumers split: those of a CTA, and those of the CTAs of a cluster. Each
// owns an equal share of a warp's fragments of 16 rows by 8 columns; the others write their partial sums of these to
// the owner's shared memory, and the owner adds them up in a fixed order.
struct SharedSums {
  static constexpr int kSources = kShares * kSplit, kEach = 4 * kAll / kSources;  // fragments that one finishes
  static constexpr int kBytes = kConsumers * (kSources - 1) * kEach * int(sizeof(Fragment[32]));  // that others leave
  static_assert(kBytes <= sizeof(SharedStorage::shared_sums));
  int rank, rows, share, warp = threadIdx.x / 32 % 4;

  __device__ __forceinline__ SharedSums(int rank, int rows, int share) : rank(rank), rows(rows), share(share) {}

  __device__ __forceinline__ int mine() const { return rank * kShares + share; }

  // The owner of a fragment: round robin, so that all own as many.
  __device__ __forceinline__ int owner(int fragment) const {
    return (fragment * 4 + warp) % kSources;
  }
  __device__ __forceinline__ bool finishes(int fragment) const { return owner(fragment) == mine(); }

  // Where a source writes a thread's part of a fragment, in the CTA of its owner. The owner itself has no such place:
  // for it, any valid one is returned.
  __device__ __forceinline__ Fragment* place(Fragment* buffer, int owner, int source, int fragment) const {
    const int number = (fragment * 4 + warp) / kSources;
    const int other = min(source - (source > owner), kSources - 2);
    return buffer + (((rows * kShares + owner % kShares) * (kSources - 1) + other) * kEach + number) * 32 + threadIdx.x % 32;
  }

  // Adds the others' partial sums to the fragments that this consumer owns.
  __device__ __forceinline__ void add(SharedStorage& shared, Accumulators& accumulators) {
    Fragment* const buffer = reinterpret_cast<Fragment*>(shared.shared_sums);
    cutlass::arch::NamedBarrier::sync(kShares * 128, 1 + rows);  // all have read the partial sums of the tile before
    CUTE_UNROLL
    for (int i = 0; i < kAll; ++i) {
      if (finishes(i)) continue;
      const Accumulator* const sum = accumulators[i / kAcross] + i % kAcross * 4;
      *place(buffer, owner(i), mine(), i) = {sum[0], sum[1], sum[2], sum[3]};
    }
    cutlass::arch::NamedBarrier::sync(kShares * 128, 1 + rows);
    CUTE_UNROLL
    for (int i = 0; i < kAll; ++i) {
      if (!finishes(i)) continue;
      Accumulator* const sum = accumulators[i / kAcross] + i % kAcross * 4;
      Accumulator total[4] = {0, 0, 0, 0};
      CUTE_UNROLL
      for (int source = 0; source < kSources; ++source) {
        const Fragment found = *place(buffer, mine(), source, i);
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) total[j] += source == mine() ? sum[j] : found.value[j];
      }
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) sum[j] = total[j];
    }
  }
};

// ---- Producer: two threads keep the stages of the pipeline full -----------------------------------
// The k tiles that a CTA loads, in order.
struct Loads {
  const GroupedTiles tiles;
  Walk walk;
  Unit unit{0, 0, 0};
  TileCoord at;    // of the unit in D
  int k_tile;  // the one to load

  __device__ __forceinline__ Loads(const Parameters& p, const SharedStorage& shared, int cluster, int clusters)
      : tiles(p, shared.groups), walk(p, tiles.count(), k_tiles(p), cluster, clusters), at{} {}

  __device__ __forceinline__ bool next() {
    if (unit.begin >= unit.end) {
      if (!walk.next(unit)) return false;
      at = tiles.at(unit.tile, 0);
    }
    k_tile = unit.begin++;
    return true;
  }
};

// Loads slabs of the groups' weights. Rows past the last are not stored, and A is zero past the end of k: any slab
// serves there.
__device__ __forceinline__ void load_slabs(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  const int64_t pitch = int64_t(p.slabs) * Slab::kBytes;  // between blocks of 64 rows
  CUTE_NO_UNROLL
  for (Loads loads(p, shared, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const int first = loads.k_tile * Slab::kOfStage;
    const int there = min(p.slabs - first, Slab::kOfStage);
    const int row_block = loads.at.n / kWgmmaM, last = p.row_blocks - 1 - row_block;
    const uint8_t* from = p.b + (int64_t(loads.at.batch) * p.row_blocks + row_block) * pitch + first * Slab::kBytes;
    uint8_t* to = shared.b[position.stage];
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx(Slab::kStageBytes);
    CUTE_UNROLL
    for (int i = 0; i < kRows / kWgmmaM; ++i) {
      Slab::load(full, to, from, there * Slab::kBytes);
      for (int slab = there; slab < Slab::kOfStage; ++slab) Slab::load(full, to + slab * Slab::kBytes, from, Slab::kBytes);
      to += Slab::kOfStage * Slab::kBytes;
      if (i < last) from += pitch;
    }
  }
}

// Loads A. Rows of a tile past the end of its group are of the next one, and are multiplied for nothing.
__device__ __forceinline__ void load_a(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};
  CUTE_NO_UNROLL
  for (Loads loads(p, shared, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx(kPanels * OperandA::kBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel)
      OperandA::load(p.a_map, full, shared.a[position.stage] + panel * OperandA::kBytes, loads.at.m,
                     loads.k_tile * kTileK + panel * kPanelK);
  }
}

// Two warps, so that neither load waits for the other.
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  if (threadIdx.x == kWarps * 32) load_slabs(p, shared, cluster, clusters);
  if (threadIdx.x == kWarps * 32 + 32) load_a(p, shared, cluster, clusters);
}

// ---- Dequantization and MMAs ------------------------------------------------------------------------
// Subnormal operands count in full: what follows depends on it.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// mxfp4 by bf16: exact, with the power of two of its group. Sign, exponent and mantissa at bits 15, 8, 7 and
// 6 mean w 2^-126, subnormal or not, and one multiplication applies that and the scale, 2^(e - 127), e <=
// 128. Three registers lie in the word as they are, turned; the fourth has what is left.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 1;
  uint32_t factor[2];

  __device__ __forceinline__ explicit Decode(uint32_t scales) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)
      factor[row] = (scales >> 8 * row & 0xff) * 0x00800080 + 0x3f003f00;  // 2^(e - 1)
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t word = words[0], left = word << 6;
    registers[0] = multiply_bf16(word & 0x81c081c0, factor[0]);
    registers[1] = multiply_bf16(__funnelshift_r(word, word, 6) & 0x81c081c0, factor[1]);
    registers[2] = multiply_bf16((word << 4) & 0x81c081c0, factor[0]);
    registers[3] = multiply_bf16((left & 0x80c080c0) | ((word >> 2) & 0x01000100), factor[1]);
  }
};

// A group's scales of a thread's rows r and r + 8.
struct Group {
  uint32_t scales;

  // Reads them from the slab at `slab`, where those of both rows are adjacent.
  __device__ __forceinline__ void read(uint32_t slab, int group) {
    const int place = group * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    const uint32_t address = slab + Slab::kScales + place;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(scales) : "r"(address));  // a byte each
  }

  __device__ __forceinline__ Decode decode() const {
    return Decode(scales);
  }
};

// A thread's codes of a slab, by steps of k.
struct Codes {
  uint32_t words[Slab::kSteps][Slab::kWords];

  __device__ __forceinline__ void read(uint32_t slab, int piece) {
    uint32_t* const to = words[0] + piece * 4;
    asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(slab + piece * Slab::kPieceBytes + threadIdx.x % 128 * 16));
  }
};
static_assert(Decode::kWords == Slab::kWords);

// Releases a stage that this warp has read by ld.shared. The proxy fence orders these generic reads before the writes
// of the next TMA load: without it TMA was seen to overwrite the end of a stage, where processes share a GPU in turns.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

__device__ __forceinline__ void clear(Accumulators& accumulators) {
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kCount; ++i) accumulators[i / kCount][i % kCount] = 0;
}

// Multiplies the accumulators by the unit in which weights were dequantized, a power of two.
__device__ __forceinline__ void to_units(Accumulators& accumulators) {
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kCount; ++i) accumulators[i / kCount][i % kCount] *= Decode::kUnit;
}

// The main loop by mma.sync: a warp has 16 of every 64 rows of W, and loads A for itself by ldmatrix, which pays off
// where A has few rows.
struct Mainloop {
  static constexpr int kOfRows = kColumns / 8;  // fragments of a thread in 64 rows
  Accumulators accumulators;
  uint32_t columns[2];  // offsets of a lane's ldmatrix row in a panel: of the first and the second 32 bytes of 64

  __device__ __forceinline__ explicit Mainloop(const uint8_t*) {
    const int lane = threadIdx.x % 32;
    columns[0] = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;  // TMA's swizzle: the 16-byte chunk XOR the row
    columns[1] = columns[0] ^ 64;
  }

  __device__ __forceinline__ static void multiply(Accumulator* d, const uint32_t (&a)[4], uint32_t low, uint32_t high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
        "{ %0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
  }

  // The MMAs of a slab of each block of rows, the first at `slabs`, with A's panels of the same k.
  __device__ __forceinline__ void add(uint32_t panels, uint32_t slabs) {
    Codes codes[kBlocks];
    Group group[kBlocks];
    constexpr int kGroupSteps = Slab::kSteps / Slab::kGroups;
    CUTE_UNROLL
    for (int pair = 0; pair < Slab::kSteps / 2; ++pair) {  // two steps: 64 bytes of A's rows
      uint32_t rows[kOfRows][4];
      CUTE_UNROLL
      for (int f = 0; f < kOfRows; ++f)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                     : "=r"(rows[f][0]), "=r"(rows[f][1]), "=r"(rows[f][2]), "=r"(rows[f][3])
                     : "r"(panels + pair * 2 / kOfPanel * OperandA::kBytes + f * 1024 + columns[pair % 2]));
      CUTE_UNROLL
      for (int step = pair * 2; step < pair * 2 + 2; ++step) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          const uint32_t slab = slabs + block * Slab::kOfStage * Slab::kBytes;
          if (step * Slab::kWords % 4 == 0) codes[block].read(slab, step * Slab::kWords / 4);
          if (step % kGroupSteps == 0) group[block].read(slab, step / kGroupSteps);
        }
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          uint32_t registers[4];
          group[block].decode().step(codes[block].words[step], registers);
          CUTE_UNROLL
          for (int f = 0; f < kOfRows; ++f)
            multiply(accumulators[block] + f * 4, registers, rows[f][step % 2 * 2], rows[f][step % 2 * 2 + 1]);
        }
      }
    }
  }

  // Runs the main loop over `count` stages, for these rows of the tile and this share of k.
  __device__ __forceinline__ void run(SharedStorage& shared, Position& position, int count, int rows, int share) {
    clear(accumulators);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      shared.full[position.stage].wait(position.phase);
      const int stage = __shfl_sync(~0u, position.stage, 0);  // the shuffle makes it warp-uniform
      const uint32_t panels = cute::cast_smem_ptr_to_uint(shared.a[stage]);
      const uint32_t slabs =
          cute::cast_smem_ptr_to_uint(shared.b[stage]) + rows * kBlocks * Slab::kOfStage * Slab::kBytes;
      CUTE_UNROLL
      for (int own = 0; own < Slab::kOfStage / kShares; ++own) {
        const int slab = own * kShares + share;
        add(panels + slab * kSlabPanels * OperandA::kBytes, slabs + slab * Slab::kBytes);
      }
      release_read(shared.empty[position.stage]);
      position.advance();
    }
    to_units(accumulators);
  }
};

// ---- Consumer: main loop over its rows of the tile and its share of k, then the epilogue -------------------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank, int cluster,
                                        int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int rows = consumer / kShares, share = consumer % kShares;
  Position position{0, 0};
  Mainloop mainloop(shared.a[0]);
  Store store;
  SharedSums total(rank, rows, share);
  Walk walk(p, tiles.count(), k_tiles(p), cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    TileCoord at = tiles.at(unit.tile, 0);
    at.n += rows * kBlocks * kWgmmaM;
    Epilogue epilogue(p, at.batch);
    mainloop.run(shared, position, unit.end - unit.begin, rows, share);
    total.add(shared, mainloop.accumulators);
    CUTE_UNROLL
    for (int i = 0; i < kAll; ++i) {
      if (!total.finishes(i)) continue;
      Value x[1][2][2];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) x[0][j % 2][j / 2] = Value(mainloop.accumulators[i / kAcross][i % kAcross * 4 + j]);
      pair_gate_with_up(x[0]);
      epilogue.apply(x[0]);
      store(p, x, at, i);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mixed_gemm_sm90a_bf16_mxfp4_bf16_g32_e8m0_gate_swiglu_oai_interleaved_groups_rows_8x64x256_mma_weights_stages8_shares2_ccaef867(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle makes it warp-uniform
  const int rank = 0;
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == kWarps * 32) {
    cute::prefetch_tma_descriptor(&p.a_map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(2);  // one producer thread for slabs, and one for A
      shared.empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  wait_for_previous_grid();  // which may have written the offsets
  shared.groups.fill(p);
  __syncthreads();
  if (warp >= kWarps) {
    produce(p, shared, cluster, clusters);
  } else {
    consume(p, shared, warp / 4, rank, cluster, clusters);
  }
}
