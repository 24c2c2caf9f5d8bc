// mixed_gemm_sm90a_e4m3_int4_bf16_g128_bf16_128x128x256_wgmma_sums_stages4_tma_ahead2_c40ece2e
//
// D[m, n] = A[m, k] W[n, k]
//   A e4m3, W int4 with scales bf16 of groups of 128, applied to sums, accumulated in fp32, D bf16 row
//   tile 128x128x256 by wgmma, 2 consumers, 4 stages, along_n, swizzle 8, store tma
//   computed as D' = W A': rows of the tensor core's tile are rows of W, columns of D
// Digest c40ece2e2a26e3302d27bea31ccb86efe8bfc85b62cb80f8f1090a5d49ee9614; `warploom show` prints this file.
//
// Warps 0 to 7, 2 consumers of 4 warps: wgmma on 64 dequantized rows of W, then the epilogue.
// Warps 8 and 9, the producer: one thread copies slabs of W, one loads A.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168).
//   A consumer thread has 64 accumulators; the epilogue takes 32 columns at once.
// Shared memory: 215104 bytes; the launch asks for 216064 of 232448
//   a            4 stages * 2 panels * 16384 = 131072
//   b            4 stages * 4 slabs * 4224 = 67584
//   staging      2 consumers * 2 buffers * 4096 = 16384
//   full, empty  4 stages * 2 * 8 = 64
// Barriers    waited for by    guards                       a phase completes after
// full        consumers        a stage until it is filled   2 arrivals and the stage's bytes
// empty       the producer     a stage while it is read     8 arrivals: every consumer warp
// named 1, 2  all that arrive  its staging buffers          128 threads of a consumer
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
constexpr int kTileM = 128, kTileN = 128, kTileK = 256;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 1, kClusterSize = kSplit;  // CTAs of a cluster that split a tile's k
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kShares = 1;     // consumers that split the k of a stage by slabs
constexpr int kSharing = kConsumers / kShares;  // consumers that split the rows of a tile
constexpr int kWarps = kConsumers * 4, kThreads = 384;  // consumer warps; then the producer's
constexpr int kStages = 4;
constexpr int kSwizzle = 8;  // columns of tiles in a band of the tile scheduler
constexpr int kRows = kTileN, kColumns = kTileM;  // of a tile, as wgmma sees it: its rows are n
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 32;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Accumulators = Accumulator[kBlocks][kCount];
using Bank = Accumulator[kBlocks][kCount];  // accumulators of one group of k

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  cute::TmaDescriptor d_map;  // D, in staging boxes
  const uint8_t* b;  // W, in slabs
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t row_blocks;  // of 64 rows of W
  int32_t slabs;  // of k, in each of them
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, d_map) == 256 && OFFSET(Parameters, b) == 384);
static_assert(OFFSET(Parameters, a_tail_rows) == 392 && OFFSET(Parameters, m) == 396);
static_assert(OFFSET(Parameters, n) == 400 && OFFSET(Parameters, k) == 404);
static_assert(OFFSET(Parameters, row_blocks) == 408 && OFFSET(Parameters, slabs) == 412);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 16384;  // of one stage
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
  static constexpr int kBytes = 4224, kDepth = 128;
  static constexpr int kPieceBytes = 2048, kPieces = 4096 / kPieceBytes;
  static constexpr int kSteps = kDepth / 32;  // of k, one for each wgmma
  static constexpr int kWords = 2;  // of a thread, in one step
  static constexpr int kScales = 4096;
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

// Stores D by TMA from two staging buffers per consumer: one is filled while TMA reads the other.
struct Store {
  static constexpr int kSpan = 128;  // bytes of a staging row
  static constexpr int kBytes = 32 * kSpan;
  uint8_t* buffers;
  int barrier, thread;  // this consumer's named barrier; the thread's index in its warpgroup
  int first = 0;        // the buffer of the tile's first chunk

  __device__ __forceinline__ Store(uint8_t* staging, int consumer)
      : buffers(staging + consumer * 2 * kBytes), barrier(1 + consumer), thread(threadIdx.x % 128) {}

  // TMA's swizzle: the index of a 16-byte chunk in its row is XORed with bits of the row's index.
  __device__ __forceinline__ static int swizzled(int row, int byte) {
    const int offset = row * kSpan + byte;
    return offset ^ ((offset >> 3) & (kSpan - 16));
  }

  // Stores a chunk; the consumer's part of the tile starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const TileCoord& at, int chunk) {
    uint8_t* buffer = buffers + (first ^ chunk % 2) * kBytes;
    if (chunk + 1 == kBlocks * kChunks) first ^= kBlocks * kChunks % 2;  // buffers alternate across tiles
    if (thread == 0) cute::tma_store_wait<1>();  // every store but the latest has read its buffer
    cutlass::arch::NamedBarrier::sync(128, barrier);
    stage(buffer, x);
    cute::tma_store_fence();  // orders these generic-proxy writes before the TMA store, across the barrier
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if (thread == 0) {
      const int column = at.n + chunk / kChunks * kWgmmaM, row = at.m + chunk % kChunks * kChunkColumns;
      cute::SM90_TMA_STORE_2D::copy(&p.d_map, buffer, column, row);
      cute::tma_store_arrive();
    }
  }

  // 16 rows by 16 columns of 16-bit elements at a time, turned on the way: wgmma's columns are rows of D.
  // Lanes 0-15 address the upper 8 rows, and lanes 8 to 15 of every 16 the right 8 columns.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, column = thread / 32 * 16 + lane / 8 % 2 * 8;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; f += 2) {
      const int row = f * 8 + lane / 16 * 8 + lane % 8;
      const uint32_t address = cute::cast_smem_ptr_to_uint(buffer) + swizzled(row, column * 2);
      Pair pairs[4];  // what wgmma has side by side, which is one above the other in D
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) pairs[i] = converted({x[f + i / 2][0][i % 2], x[f + i / 2][1][i % 2]});
      const auto& words = reinterpret_cast<const uint32_t(&)[4]>(pairs);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(address),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
    }
  }

  // The CTA must not exit while TMA still reads its shared memory.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][kPanels * OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t staging[16384];
  alignas(128) uint8_t b[kStages][Slab::kStageBytes];
  FullBarrier full[kStages];    // the bytes of both producers have arrived
  EmptyBarrier empty[kStages];  // every consumer warp has read the stage
};
static_assert(sizeof(SharedStorage) <= 216064);

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

// int4 by e4m3: exact codes q / kUnit; the scale is applied later. Bits 0 to 3 of e4m3 are an integer n
// that means n 2^-9, as 16 does too. A nibble is 2 q, or 2 (-1 - q) + 1 where q is negative: that 1 becomes
// the sign and, in the same multiply-add, the 2 that is missing.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 256;

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      registers[i] = (nibbles & 0x01010101) * 0x82 + (nibbles & 0x0e0e0e0e);
    }
  }
};

// A group's scales of a thread's rows r and r + 8.
struct Group {
  uint32_t scales;

  // Reads them from the slab at `slab`, where those of both rows are adjacent.
  __device__ __forceinline__ void read(uint32_t slab, int group) {
    const int place = group * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    const uint32_t address = slab + Slab::kScales + place * 2;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(address));
  }

  __device__ __forceinline__ float low() const { return __uint_as_float(scales << 16); }
  __device__ __forceinline__ float high() const { return __uint_as_float(scales & 0xffff0000); }

  __device__ __forceinline__ Decode decode() const {
    return Decode();
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
  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// The main loop by wgmma. The MMAs of a group of k are issued in parts of the tile's columns, each with its own bank
// of accumulators: while one part is in flight, another is promoted and the next group's weights are dequantized.
struct Mainloop {
  static constexpr int kIssued = 4;  // steps that are issued together: all of a group
  static constexpr int kOfSlab = Slab::kSteps / kIssued, kOfStage = Slab::kOfStage / kShares * kOfSlab;
  static constexpr int kParts = 2, kOfPart = kCount / kParts;
  static constexpr int kPart = OperandA::kBytes / kParts / 16;  // from one part's rows of A to the next's
  static_assert(kOfStage % 2 == 0);  // so that weights stay in their registers
  using Weights = uint32_t[kBlocks][kIssued][4];
  Accumulators accumulators;
  Accumulator bank[kParts][kBlocks][kOfPart];
  Codes codes[kBlocks];  // of a slab
  Weights weights[2];    // of the group in flight, and of the next
  Group groups[2][kBlocks];
  uint64_t panels;       // the descriptor of the first stage

  __device__ __forceinline__ explicit Mainloop(const uint8_t* a)
      : panels(matrix(a, 0, 1024, 1)) {}

  // A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
  __device__ __forceinline__ void fence(int part) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kOfPart; ++i) asm volatile("" : "+f"(bank[part][i / kOfPart][i % kOfPart])::"memory");
  }

  // Dequantizes the i-th group of a stage.
  __device__ __forceinline__ void decode(uint32_t slabs, int i) {
    Weights& into = weights[i % 2];
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t slab = slabs + (block * Slab::kOfStage + i / kOfSlab * kShares) * Slab::kBytes;
      CUTE_UNROLL
      for (int piece = 0; piece < Slab::kPieces; ++piece)
        if (piece * Slab::kSteps / Slab::kPieces / kIssued == i % kOfSlab) codes[block].read(slab, piece);
      groups[i % 2][block].read(slab, i % kOfSlab);
    }
    CUTE_UNROLL
    for (int j = 0; j < kBlocks * kIssued; ++j) {
      const int block = j % kBlocks, step = j / kBlocks;
      const Group& of = groups[i % 2][block];
      of.decode().step(codes[block].words[i % kOfSlab * kIssued + step], into[block][step]);
    }
    CUTE_UNROLL
    for (int j = 0; j < kBlocks * kIssued * 4; ++j)  // all are written before the MMAs are issued
      asm volatile("" : "+r"(into[j % kBlocks][j / kBlocks / 4][j / kBlocks % 4])::"memory");
  }

  // Issues the MMAs of a part of the i-th group.
  __device__ __forceinline__ void multiply(uint64_t a, int i, int part) {
    fence(part);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int j = 0; j < kIssued; ++j) {
      const int step = i % kOfSlab * kIssued + j, panel = i / kOfSlab * kShares * kSlabPanels + step / kOfPanel;
      const uint64_t at = a + panel * (OperandA::kBytes / 16) + part * kPart + step % kOfPanel * OperandA::kStep;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) Wgmma::fma(weights[i % 2][block][j], at, bank[part][block], j > 0);
    }
    cute::warpgroup_commit_batch();
  }

  // Adds a part of the i-th group to the accumulators, times its scales.
  __device__ __forceinline__ void promote(int i, int part) {
    fence(part);
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const Group& of = groups[i % 2][block];
      const float low = of.low() * Decode::kUnit, high = of.high() * Decode::kUnit;
      CUTE_UNROLL
      for (int j = 0; j < kOfPart; ++j) accumulators[block][part * kOfPart + j] += (j % 4 < 2 ? low : high) * bank[part][block][j];
    }
  }

  // Runs the main loop over `count` stages, one at least, for these rows of the tile and this share of k.
  __device__ __forceinline__ void run(SharedStorage& shared, Position& position, int count, int rows, int share) {
    const uint64_t panels = this->panels + share * kSlabPanels * (OperandA::kBytes / 16);
    const uint32_t first =
        cute::cast_smem_ptr_to_uint(shared.b[0]) + (rows * kBlocks * Slab::kOfStage + share) * Slab::kBytes;
    clear(accumulators);
    shared.full[position.stage].wait(position.phase);
    int stage = __shfl_sync(~0u, position.stage, 0);  // the shuffle makes it warp-uniform
    decode(first + stage * Slab::kStageBytes, 0);
    CUTE_NO_UNROLL
    do {  // with a loop of zero trips ptxas would serialize wgmma (C7514)
      const uint64_t a = panels + stage * (kPanels * OperandA::kBytes / 16);
      const uint32_t slabs = first + stage * Slab::kStageBytes;
      EmptyBarrier& empty = shared.empty[position.stage];
      CUTE_UNROLL
      for (int part = 0; part < kParts; ++part) multiply(a, 0, part);
      CUTE_UNROLL
      for (int i = 0; i < kOfStage - 1; ++i) {
        decode(slabs, i + 1);
        CUTE_UNROLL
        for (int part = 0; part < kParts; ++part) {
          cute::warpgroup_wait<kParts - 1>();
          promote(i, part);
          multiply(a, i + 1, part);
        }
      }
      // After the last stage this dequantizes it once more, unused: a branch would serialize wgmma.
      Position next = position;
      next.advance();
      const bool more = count > 1;
      stage = __shfl_sync(~0u, more ? next.stage : position.stage, 0);
      shared.full[stage].wait(more ? next.phase : position.phase);
      decode(first + stage * Slab::kStageBytes, 0);
      // ptxas tracks a bank in flight within an iteration, but not into the next.
      cute::warpgroup_wait<1>();
      promote(kOfStage - 1, 0);
      cute::warpgroup_wait<0>();
      release(empty);
      promote(kOfStage - 1, kParts - 1);
      position = next;
    } while (--count > 0);
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
  Store store(shared.staging, consumer);
  Walk walk(p, tiles.count(), k_tiles(p), cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    TileCoord at = tiles.at(unit.tile, 0);
    at.n += rows * kBlocks * kWgmmaM;
    mainloop.run(shared, position, unit.end - unit.begin, rows, share);
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
  store.finish();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mixed_gemm_sm90a_e4m3_int4_bf16_g128_bf16_128x128x256_wgmma_sums_stages4_tma_ahead2_c40ece2e(const __grid_constant__ Parameters p) {
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
