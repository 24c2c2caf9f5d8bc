// mixed_gemm_sm90a_int8_uint4_bf16_g32_fp16_64x128x256_wgmma_sums_stages6_stream_k_abaebdbf
//
// D[m, n] = A[m, k] W[n, k]
//   A int8, W uint4 with scales fp16 of groups of 32, applied to sums, accumulated in int32, D bf16 row
//   tile 64x128x256 by wgmma, 2 consumers, 6 stages, along_n, swizzle 8, store direct
//   computed as D' = W A': rows of the tensor core's tile are rows of W, columns of D
//   stream-K: CTAs split the k of all tiles of less than 4 waves;
//   else of those that do not fill a wave, and of one wave before these
// Digest abaebdbfc5abb7b2461045ec90947b9869b3baa469db67f694eda4e6108f319d; `warploom show` prints this file.
//
// Warps 0 to 7, 2 consumers of 4 warps: wgmma on 64 dequantized rows of W, then the epilogue.
// Warps 8 and 9, the producer: one thread copies slabs of W, one loads A.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168).
//   A consumer thread has 32 accumulators; the epilogue takes 64 columns at once.
// Shared memory: 215136 bytes; the launch asks for 216064 of 232448
//   a            6 stages * 2 panels * 8192 = 98304
//   b            6 stages * 4 slabs * 4864 = 116736
//   full, empty  6 stages * 2 * 8 = 96
// Barriers    waited for by  guards                       a phase completes after
// full        consumers      a stage until it is filled   2 arrivals and the stage's bytes
// empty       the producer   a stage while it is read     8 arrivals: every consumer warp
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
constexpr int kTileM = 64, kTileN = 128, kTileK = 256;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 1, kClusterSize = kSplit;  // CTAs of a cluster that split a tile's k
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kShares = 1;     // consumers that split the k of a stage by slabs
constexpr int kSharing = kConsumers / kShares;  // consumers that split the rows of a tile
constexpr int kWarps = kConsumers * 4, kThreads = 384;  // consumer warps; then the producer's
constexpr int kStages = 6;
constexpr int kSwizzle = 8;  // columns of tiles in a band of the tile scheduler
constexpr int kRows = kTileN, kColumns = kTileM;  // of a tile, as wgmma sees it: its rows are n
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 64;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Accumulators = Accumulator[kBlocks][kCount];
using Bank = int32_t[kBlocks][kCount];  // accumulators of one group of k

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  const uint8_t* b;  // W, in slabs
  cutlass::bfloat16_t* d;  // D[m][pitch]
  float* parts;  // sums of parts of tiles, by blocks
  int* raised;  // a flag for each warp of each block that leaves a part
  int64_t d_pitch;  // elements between rows of D
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t cut;  // tiles that are cut: the first
  int32_t row_blocks;  // of 64 rows of W
  int32_t slabs;  // of k, in each of them
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b) == 256 && OFFSET(Parameters, d) == 264);
static_assert(OFFSET(Parameters, parts) == 272 && OFFSET(Parameters, raised) == 280);
static_assert(OFFSET(Parameters, d_pitch) == 288 && OFFSET(Parameters, a_tail_rows) == 296);
static_assert(OFFSET(Parameters, m) == 300 && OFFSET(Parameters, n) == 304);
static_assert(OFFSET(Parameters, k) == 308 && OFFSET(Parameters, cut) == 312);
static_assert(OFFSET(Parameters, row_blocks) == 316 && OFFSET(Parameters, slabs) == 320);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 8192;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, m);
  }
};

// W is stored in slabs of 64 rows by 128 k: 4096 bytes of codes, in the order in which threads hold wgmma's A
// operand (16 bytes a thread, 2048 a piece), then the scales of its groups, those of rows r and r + 8 adjacent.
struct Slab {
  static constexpr int kBytes = 4864, kDepth = 128;
  static constexpr int kPieceBytes = 2048, kPieces = 4096 / kPieceBytes;
  static constexpr int kSteps = kDepth / 32;  // of k, one for each wgmma
  static constexpr int kWords = 2;  // of a thread, in one step
  static constexpr int kScales = 4096;
  static constexpr int kGroups = 4;
  static constexpr int kZeros = kScales + 512;
  static constexpr int kOfStage = kTileK / kDepth;  // along k
  static constexpr int kStageBytes = 4 * kBytes;

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
constexpr int kPanels = 2, kPanelK = kTileK / kPanels, kSlabPanels = kPanels / Slab::kOfStage;
constexpr int kOfPanel = Slab::kSteps / kSlabPanels;  // steps

// The wgmma descriptor of a matrix in shared memory: `stride` bytes between groups of 8 rows, `leading` bytes
// between swizzle atoms side by side, `layout` 1, 2, 3 for swizzles of 128, 64, 32 bytes. Its address counts
// 16 bytes, so that adding i to a descriptor moves it by 16 i bytes.
__device__ __forceinline__ uint64_t matrix(const uint8_t* start, int leading, int stride, int layout) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(start) >> 4;
  descriptor.bitfield.leading_byte_offset_ = leading >> 4;
  descriptor.bitfield.stride_byte_offset_ = stride >> 4;
  descriptor.bitfield.layout_type_ = layout;
  return descriptor;
}

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
};

// The tile scheduler. It counts in tiles of clusters.
struct Tiles {
  int columns, rows;

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : columns((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)),
        rows((p.m + kTileM * kClusterM - 1) / (kTileM * kClusterM)) {}

  __device__ __forceinline__ int count() const { return rows * columns; }

  // The tile of the CTA with this rank.
  __device__ __forceinline__ TileCoord at(int index, int rank) const {
    // Tiles are taken in bands of kSwizzle columns, each row by row, so that the operands of tiles in flight
    // stay in L2. In a band of 2 columns the order is 0 1 over 2 3 over 4 5.
    const int band = index / (kSwizzle * rows);
    const int width = min(columns - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * rows;
    const int column = band * kSwizzle + offset % width, row = offset / width;
    return {(row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN};
  }
};

__device__ __forceinline__ int k_tiles(const Parameters& p) { return (p.k + kTileK - 1) / kTileK; }

// A unit of work: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The stream-K scheduler. It counts the k tiles of the first p.cut tiles, one tile after another, and splits
// them into a range for each cluster, whose lengths differ by at most one. Clusters then take the other tiles
// whole.
// 3 tiles of 8 k tiles on 4 clusters: ranges 0-5, 6-11, 12-17, 18-23. Cluster 1 has the last 2 k tiles of
// tile 0 and the first 4 of tile 1: it adds cluster 0's partial sums to its own of tile 0, and writes those of
// tile 1 for cluster 2. A cluster begins with the last tile of its range, whose partial sums another one waits
// for: so clusters wait only for those of lower index, whose CTAs start before their own.
struct Walk {
  int k_tiles, tiles, clusters;
  int shared;     // k tiles of all ranges
  int low, high;  // the rest of this cluster's range
  int whole;      // the next whole tile

  __device__ __forceinline__ Walk(const Parameters& p, int tiles, int k_tiles, int cluster, int clusters)
      : k_tiles(k_tiles),
        tiles(tiles),
        clusters(clusters),
        shared(p.cut * k_tiles),
        low(start(cluster)),
        high(start(cluster + 1)),
        whole(p.cut + cluster) {}

  // The first k tile of a cluster's range.
  __device__ __forceinline__ int start(int cluster) const { return cluster * shared / clusters; }

  // The cluster whose range has the first k tile of a split tile.
  __device__ __forceinline__ int first(int tile) const {
    return ((tile * k_tiles + 1) * clusters - 1) / shared;
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (low < high) {
      const int tile = (high - 1) / k_tiles, start = tile * k_tiles;
      unit = {tile, max(low - start, 0), high - start};
      high = start + unit.begin;
      return true;
    }
    unit = {whole, 0, k_tiles};
    whole += clusters;
    return unit.tile < tiles;
  }
};

// The rows and columns of D that a thread's fragment of 2 x 2 accumulators has. Epilogue and store see
// accumulators by these alone, never by wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

// Coordinates of fragment f of a chunk of the consumer's part of the tile, which starts at `at`: the MMA gives
// lane l the rows l / 4 and l / 4 + 8 of its warp's 16, and the columns 2 (l % 4) and 2 (l % 4) + 1 of every 8.
// Its rows are columns of D here.
__device__ __forceinline__ Coordinates coordinates(const TileCoord& at, int chunk, int f) {
  const int lane = threadIdx.x % 32;
  const int row = at.n + chunk / kChunks * kWgmmaM + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = at.m + chunk % kChunks * kChunkColumns + f * 8 + lane % 4 * 2;
  return { {column, column + 1}, {row, row + 8} };
}

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
        if (place.row[i] >= p.m) continue;
        ElementD* row = p.d + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n) row[place.column[j]] = pair.value[j];
      }
    }
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][kPanels * OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(128) uint8_t b[kStages][Slab::kStageBytes];
  FullBarrier full[kStages];    // the bytes of both producers have arrived
  EmptyBarrier empty[kStages];  // every consumer warp has read the stage
};
static_assert(sizeof(SharedStorage) <= 216064);

// Four accumulators of a thread, in 64 rows by 8 columns: what one access moves.
struct alignas(16) Fragment { Accumulator value[4]; };

// Partial sums of tiles whose k clusters split (stream-K). A cluster without a tile's last k tile writes its
// accumulators to memory, in its own slot: it has at most one such tile. The cluster with the last k tile adds
// them to its own, in the order of k. A warp waits only for the same warp of those clusters.
struct Parts {
  static constexpr int kOfRows = kColumns / 8, kOfBlock = kBlocks * kOfRows;
  static constexpr int kThreads = kConsumers * 128;
  static constexpr int kInFlight = 4;  // fragments that a thread has in flight
  static constexpr int kAtOnce = kOfBlock < kInFlight ? kInFlight / kOfBlock : 1;  // parts,
  static constexpr int kRead = kOfBlock < kInFlight ? kOfBlock : kInFlight;        // and of each of them
  using Accumulators = Accumulator[kBlocks][kOfRows * 4];
  Fragment* const parts;
  int* const raised;  // a flag for each warp: set once its partial sums are written, cleared by their reader
  int rank, thread;

  __device__ __forceinline__ Parts(const Parameters& p, int rank, int consumer)
      : parts(reinterpret_cast<Fragment*>(p.parts)),
        raised(p.raised),
        rank(rank),
        thread(consumer * 128 + threadIdx.x % 128) {}

  __device__ __forceinline__ Fragment* place(int cluster, int fragment) const {
    return parts + ((cluster * kClusterSize + rank) * kOfBlock + fragment) * kThreads + thread;
  }
  __device__ __forceinline__ int* flag(int cluster) const {
    return raised + (cluster * kClusterSize + rank) * (kThreads / 32) + thread / 32;
  }

  // Writes this CTA's partial sums. After __syncwarp, st.release orders the writes of all lanes before the
  // flag; ld.acquire in add() orders reads after it.
  __device__ __forceinline__ void leave(const Accumulators& accumulators, int cluster) const {
    CUTE_UNROLL
    for (int i = 0; i < kOfBlock; ++i) {
      const Accumulator* const sum = accumulators[i / kOfRows] + i % kOfRows * 4;
      *place(cluster, i) = {sum[0], sum[1], sum[2], sum[3]};
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag(cluster)) : "memory");
  }

  // ld.cg: other SMs wrote it, and L1 is not coherent.
  __device__ __forceinline__ static Fragment read(const Fragment* from) {
    Fragment found;
    asm volatile("ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(found.value[0]), "=f"(found.value[1]), "=f"(found.value[2]), "=f"(found.value[3])
                 : "l"(from)
                 : "memory");
    return found;
  }

  // Adds the partial sums that the clusters from `first` up to `last` write.
  __device__ __forceinline__ void add(Accumulators& accumulators, int first, int last) const {
    for (int other = first + int(threadIdx.x % 32); other < last; other += 32) {
      int up;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(up) : "l"(flag(other)) : "memory");
      while (up == 0);
      *flag(other) = 0;  // the next launch must find it cleared
    }
    __syncwarp();
    CUTE_NO_UNROLL
    for (int other = first; other < last; other += kAtOnce) {
      CUTE_UNROLL
      for (int begin = 0; begin < kOfBlock; begin += kRead) {
        Fragment found[kAtOnce][kRead];
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce * kRead; ++i)
          if (other + i / kRead < last && begin + i % kRead < kOfBlock)
            found[i / kRead][i % kRead] = read(place(other + i / kRead, begin + i % kRead));
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce * kRead; ++i) {
          const int fragment = begin + i % kRead;
          if (other + i / kRead < last && fragment < kOfBlock) {
            Accumulator* const sum = accumulators[fragment / kOfRows] + fragment % kOfRows * 4;
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) sum[j] += found[i / kRead][i % kRead].value[j];
          }
        }
      }
    }
  }
};

// ---- Producer: two threads keep the stages of the pipeline full -----------------------------------
// The k tiles that a CTA loads, in order.
struct Loads {
  const Tiles tiles;
  Walk walk;
  Unit unit{0, 0, 0};
  TileCoord at;    // of the unit in D
  int k_tile;  // the one to load

  __device__ __forceinline__ Loads(const Parameters& p, int cluster, int clusters)
      : tiles(p), walk(p, tiles.count(), k_tiles(p), cluster, clusters), at(tiles.at(0, 0)) {}

  __device__ __forceinline__ bool next() {
    if (unit.begin >= unit.end) {
      if (!walk.next(unit)) return false;
      at = tiles.at(unit.tile, 0);
    }
    k_tile = unit.begin++;
    return true;
  }
};

// Loads slabs of weights, and does not wait for the previous grid: no kernel launched just before writes weights,
// while its D may be A. Rows past the last are not stored, and A is zero past the end of k: any slab serves there.
__device__ __forceinline__ void load_slabs(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  const int64_t pitch = int64_t(p.slabs) * Slab::kBytes;  // between blocks of 64 rows
  CUTE_NO_UNROLL
  for (Loads loads(p, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const int first = loads.k_tile * Slab::kOfStage;
    const int there = min(p.slabs - first, Slab::kOfStage);
    const int row_block = loads.at.n / kWgmmaM, last = p.row_blocks - 1 - row_block;
    const uint8_t* from = p.b + row_block * pitch + first * Slab::kBytes;
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

// Loads A, once the previous grid is done.
__device__ __forceinline__ void load_a(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  wait_for_previous_grid();
  Position position{0, 1};
  CUTE_NO_UNROLL
  for (Loads loads(p, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const bool tail = p.m - loads.at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& map = tail ? p.a_tail_map : p.a_map;
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx((tail ? p.a_tail_rows : kTileM) * (kPanels * OperandA::kBytes / kTileM));
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel)
      OperandA::load(map, full, shared.a[position.stage] + panel * OperandA::kBytes, loads.at.m,
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
// (a & mask) | more in one instruction, where the compiler makes two of two constants.
__device__ __forceinline__ uint32_t masked_with(uint32_t a, uint32_t mask, uint32_t more) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(more));
  return d;
}
// Four bytes of b:a (0..3 are a's) by the nibbles of `choice`; 8 more is that byte's sign, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(choice));
  return d;
}

// uint4 by int8: exact q - z; the scale is applied later. With 128 more no byte borrows from the next.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 1;
  uint32_t zero[2];  // of a row, in each byte

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) zero[row] = permute(zeros, 0, row ? 0x1111 : 0);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      registers[i] = (masked_with(nibbles, 0x0f0f0f0f, 0x80808080) - zero[i % 2]) ^ 0x80808080;
    }
  }
};

// A group's scales of a thread's rows r and r + 8, and their zero points, a byte each.
struct Group {
  uint32_t scales;
  uint32_t zeros;

  // Reads them from the slab at `slab`, where those of both rows are adjacent.
  __device__ __forceinline__ void read(uint32_t slab, int group) {
    const int place = group * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    const uint32_t address = slab + Slab::kScales + place * 2;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(address));
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(zeros) : "r"(slab + Slab::kZeros + place));
  }

  __device__ __forceinline__ float low() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[0]); }
  __device__ __forceinline__ float high() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[1]); }

  __device__ __forceinline__ Decode decode() const {
    return Decode(zeros);
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

// Arrives at the empty barrier of a stage for this warp, if `there`. Predicated: a branch would serialize wgmma.
__device__ __forceinline__ void release(EmptyBarrier& empty, bool there = true) {
  __syncwarp();
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                   cute::cast_smem_ptr_to_uint(&empty)),
               "r"(int(there && threadIdx.x % 32 == 0))
               : "memory");
}

__device__ __forceinline__ void clear(Accumulators& accumulators) {
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kCount; ++i) accumulators[i / kCount][i % kCount] = 0;
}

// Adds the accumulators of a group to those of the tile, times the scales.
__device__ __forceinline__ void promote(Accumulators& accumulators, const Bank& part, const Group (&group)[kBlocks]) {
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    const float low = group[block].low() * Decode::kUnit, high = group[block].high() * Decode::kUnit;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) accumulators[block][i] += (i % 4 < 2 ? low : high) * part[block][i];
  }
}

// D[64 x 64] += A[64 x 32] * B[32 x 64]; A in registers, B by descriptor, D in registers.
struct Wgmma {
  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, int32_t (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// The main loop by wgmma: threads dequantize weights into the registers of its A operand while the tensor core
// multiplies those dequantized before.
struct Mainloop {
  static constexpr int kIssued = 1;  // steps that are issued together, of each block of rows
  static constexpr int kIssues = Slab::kSteps / kIssued;  // of a slab
  static constexpr int kOfGroup = kIssues / Slab::kGroups;
  static constexpr int kBanks = Slab::kOfStage / kShares * Slab::kGroups;  // groups of a stage take banks in turn
  Accumulators accumulators;
  Bank banks[2];
  Group pending[kBlocks];  // the group before
  uint64_t panels;  // the descriptor of the first stage

  __device__ __forceinline__ explicit Mainloop(const uint8_t* a)
      : panels(matrix(a, 0, 1024, 1)) {}

  // A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
  __device__ __forceinline__ static void fence(Bank& held) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) asm volatile("" : "+r"(held[i / kCount][i % kCount])::"memory");
  }

  // Issues the MMAs of a slab of each block of rows, and returns while the last are in flight. `own`: the slab's
  // index among the consumer's of the stage. Releases the previous stage, if one is held, once its MMAs are done.
  __device__ __forceinline__ void add(uint64_t a, uint32_t slabs, int own, EmptyBarrier& previous, bool held) {
    Codes codes[kBlocks];
    Group group[kBlocks];
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTE_UNROLL
      for (int piece = 0; piece < Slab::kPieces; ++piece)
        codes[block].read(slabs + block * Slab::kOfStage * Slab::kBytes, piece);
    }
    CUTE_UNROLL
    for (int issue = 0; issue < kIssues; ++issue) {
      constexpr int kEach = kIssues / Slab::kGroups;
      if (issue % kEach == 0) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block)
          group[block].read(slabs + block * Slab::kOfStage * Slab::kBytes, issue / kEach);
      }
      uint32_t registers[kBlocks][kIssued][4];
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks; ++i) {
        const int block = i % kBlocks, step = issue * kIssued + i / kBlocks;
        group[block].decode().step(codes[block].words[step], registers[block][i / kBlocks]);
      }
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks * 4; ++i)  // all are written before the MMAs are issued
        asm volatile("" : "+r"(registers[i % kBlocks][i / kBlocks / 4][i / kBlocks % 4])::"memory");
      const int bank = own * Slab::kGroups + issue / kOfGroup;
      Bank& into = banks[bank % 2];
      fence(into);
      cute::warpgroup_arrive();
      CUTE_UNROLL
      for (int i = 0; i < kIssued; ++i) {
        const int step = issue * kIssued + i;
        const uint64_t at = a + step / kOfPanel * (OperandA::kBytes / 16) + step % kOfPanel * OperandA::kStep;
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block)
          Wgmma::fma(registers[block][i], at, into[block], issue % kOfGroup != 0 || i > 0);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // the batch before is done: its A registers may be overwritten
      if (issue % kOfGroup == 0) {
        if (bank > 0) {
          fence(banks[1 - bank % 2]);
          promote(accumulators, banks[1 - bank % 2], pending);
        }
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) pending[block] = group[block];
      }
    }
  }

  // Runs the main loop over `count` stages, one at least, for these rows of the tile and this share of k.
  __device__ __forceinline__ void run(SharedStorage& shared, Position& position, int count, int rows, int share) {
    clear(accumulators);
    int i = 0, previous = position.stage;
    CUTE_NO_UNROLL
    do {  // with a loop of zero trips ptxas would serialize wgmma (C7514)
      shared.full[position.stage].wait(position.phase);
      const int stage = __shfl_sync(~0u, position.stage, 0);  // the shuffle makes it warp-uniform
      const uint64_t a = panels + stage * (kPanels * OperandA::kBytes / 16);
      const uint32_t slabs =
          cute::cast_smem_ptr_to_uint(shared.b[stage]) + rows * kBlocks * Slab::kOfStage * Slab::kBytes;
      CUTE_UNROLL
      for (int own = 0; own < Slab::kOfStage / kShares; ++own) {
        const int slab = own * kShares + share;
        add(a + slab * kSlabPanels * (OperandA::kBytes / 16), slabs + slab * Slab::kBytes, own, shared.empty[previous],
            i > 0);
      }
      // ptxas tracks a bank in flight within an iteration, but not into the next.
      cute::warpgroup_wait<0>();
      fence(banks[1 - kBanks % 2]);
      release(shared.empty[position.stage]);
      promote(accumulators, banks[1 - kBanks % 2], pending);
      previous = position.stage;
      position.advance();
    } while (++i < count);
  }
};

// ---- Consumer: main loop over its rows of the tile and its share of k, then the epilogue -------------------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank, int cluster,
                                        int clusters) {
  wait_for_previous_grid();
  const Tiles tiles(p);
  const int rows = consumer / kShares, share = consumer % kShares;
  Position position{0, 0};
  Mainloop mainloop(shared.a[0]);
  Store store;
  const Parts parts(p, rank, consumer);
  Walk walk(p, tiles.count(), k_tiles(p), cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    TileCoord at = tiles.at(unit.tile, 0);
    at.n += rows * kBlocks * kWgmmaM;
    mainloop.run(shared, position, unit.end - unit.begin, rows, share);
    if (unit.end < walk.k_tiles) {
      parts.leave(mainloop.accumulators, cluster);
      continue;
    }
    if (unit.begin > 0) parts.add(mainloop.accumulators, walk.first(unit.tile), cluster);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i % 2][i / 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
      }
      store(p, x, at, chunk);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mixed_gemm_sm90a_int8_uint4_bf16_g32_fp16_64x128x256_wgmma_sums_stages6_stream_k_abaebdbf(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle makes it warp-uniform
  const int rank = 0;
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == kWarps * 32) {
    for (const auto* map : {&p.a_map, &p.a_tail_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(2);  // one producer thread for slabs, and one for A
      shared.empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (warp >= kWarps) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    produce(p, shared, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warp / 4, rank, cluster, clusters);
  }
}
