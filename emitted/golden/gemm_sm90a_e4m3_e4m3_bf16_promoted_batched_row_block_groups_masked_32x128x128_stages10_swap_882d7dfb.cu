// gemm_sm90a_e4m3_e4m3_bf16_promoted_batched_row_block_groups_masked_32x128x128_stages10_swap_882d7dfb
//
// D[m, n] = A[m, k] B[k, n]
//   A e4m3 row, B e4m3 col, accumulated in fp32, D bf16 row
//   rows of A and D in groups of one size, of which as many count as device memory says, and a B for each
//   tile 32x128x128, cluster 1x1, 2 consumers, 10 stages, along_m, swizzle 8, store tma
//   swapped: the rows of wgmma are columns of D, which is D' = B' A'
// Digest 882d7dfbfd6f301a3afe31cd5297170d3fce77f8dbab08d343ac27d102e7ef01; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads; warps 1 to 3 copy block scales where TMA cannot.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 16 accumulators and 16 for one k tile.
//   Its epilogue takes 32 columns at a time, to save registers.
// Shared memory: 230984 bytes; the launch asks for 231424 of 232448
//   a, b         10 stages * (4096 + 16384) = 204800
//   staging      2 consumers * 2 buffers * 4096 = 16384
//   scales       10 stages * 144 = 1440
//   groups       2050 integers * 4 = 8200
//   full, empty  10 stages * 2 * 8 = 160
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes, and scale copies
// empty       the producer     a stage while wgmma reads it  8 arrivals: 8 consumer warps
// named 1, 2  all that arrive  its staging buffers           128 threads of a consumer
// cluster     all that arrive  barriers before use           all threads of 1 CTA
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
constexpr int kTileM = 32, kTileN = 128, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 2;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 10;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 128, kColumns = 32;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 32;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cute::TmaDescriptor d_map;  // D, in staging boxes
  const int* offsets;  // how many rows of each group count
  const float* a_scales;  // a scale for each 1 m x 128 k of A
  const float* b_scales;  // a scale for each 128 n x 128 k of B
  int64_t a_scales_row;  // elements between those along m
  int64_t a_scales_k;  // elements between those along k
  int64_t b_scales_row;  // elements between those along n
  int64_t b_scales_k;  // elements between those along k
  int64_t b_scales_batch_pitch;  // elements between groups
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t batches;  // groups
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, b_map) == 128);
static_assert(OFFSET(Parameters, d_map) == 256 && OFFSET(Parameters, offsets) == 384);
static_assert(OFFSET(Parameters, a_scales) == 392 && OFFSET(Parameters, b_scales) == 400);
static_assert(OFFSET(Parameters, a_scales_row) == 408 && OFFSET(Parameters, a_scales_k) == 416);
static_assert(OFFSET(Parameters, b_scales_row) == 424 && OFFSET(Parameters, b_scales_k) == 432);
static_assert(OFFSET(Parameters, b_scales_batch_pitch) == 440 && OFFSET(Parameters, m) == 448);
static_assert(OFFSET(Parameters, n) == 452 && OFFSET(Parameters, k) == 456);
static_assert(OFFSET(Parameters, batches) == 460);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 32] += A[64 x 32] * B[32 x 32]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[16], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

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

// Boxes of D stop where a group ends. Its map counts rows by two coordinates, the first of which ends
// here: a box with `valid` rows up to the row `end` is at (kRowsEnd - valid, end). The last takes kRowsEnd off.
constexpr int kRowsEnd = 1 << 30;

// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 4096;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, m);
  }
};

// B is K-major: a row of 128 bytes has the k tile of one n.
struct OperandB {
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (n, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k, int batch) {
    cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally,
        tile, k, n, batch);
  }
};

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

// Where each group of rows ends, and how many tiles come before that: filled once a launch, in shared memory.
struct GroupTable {
  static constexpr int kMost = 1024, kRowsOfTile = kTileM * kClusterM;
  int ends[kMost + 1], tiles[kMost + 1];  // of group g at g + 1; tiles along m, counted in clusters

  // A number of rows below 0 counts as none, and one past the rows of a group as all: no tile has others.
  __device__ __forceinline__ void fill(const Parameters& p) {
    const int rows = p.m / p.batches;
    for (int group = threadIdx.x; group < p.batches; group += blockDim.x)
      ends[group + 1] = group * rows + max(0, min(p.offsets[group], rows));
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // Each lane has some consecutive groups; a scan over lanes adds up the tiles before these.
    const int lane = threadIdx.x, each = (p.batches + 31) / 32;
    const int first = min(lane * each, p.batches), last = min(first + each, p.batches);
    int count = 0;
    for (int group = first; group < last; ++group) {
      count += tiles_of(ends[group + 1] - group * rows);
    }
    const int own = count;
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, count, apart);
      if (lane >= apart) count += other;
    }
    count -= own;
    for (int group = first; group < last; ++group) {
      count += tiles_of(ends[group + 1] - group * rows);
      tiles[group + 1] = count;
    }
    if (lane == 0) ends[0] = tiles[0] = 0;
  }

  __device__ __forceinline__ static int tiles_of(int rows) { return (rows + kRowsOfTile - 1) / kRowsOfTile; }
};

// The tile scheduler: the tiles of one group after the other, in bands. Groups without rows have no tile.
struct GroupedTiles {
  const GroupTable& table;
  const int groups, rows_of_group, columns;  // of tiles, in clusters

  __device__ __forceinline__ GroupedTiles(const Parameters& p, const GroupTable& table)
      : table(table), groups(p.batches), rows_of_group(p.m / p.batches),
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
    // Tiles are taken in bands of kSwizzle rows, each column by column, so that the operands of tiles in flight
    // stay in L2. In a band of 2 rows the order is 0 2 4 over 1 3 5.
    const int band = index / (kSwizzle * columns);
    const int width = min(rows - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * columns;
    const int row = band * kSwizzle + offset % width, column = offset / width;
    return {group * rows_of_group + (row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN, group, table.ends[group + 1]};
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
      // The group may end in the midst of the buffer: TMA stores its rows up to that.
      const int row = at.m + chunk % kChunks * kChunkColumns, column = at.n + chunk / kChunks * kWgmmaM;
      const int rows = max(0, min(32, at.m_end - row));
      cute::SM90_TMA_STORE_4D::copy(&p.d_map, buffer, column, kRowsEnd - rows, row + rows, int(kRowsEnd));
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

// The block scales of one stage that single rows have: of the tile's rows of A.
struct Scales {
  alignas(16) float columns[36];
};
static_assert(sizeof(Scales) == 144);

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[16384];
  Scales scales[kStages];
  GroupTable groups;
  FullBarrier full[kStages];    // all bytes and scales of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 231424);

// ---- Block scales: by TMA where it can, else by the other warps of the producer -------------------
// Whether TMA can copy them: those of one k lie side by side, and begin at multiples of 16 bytes. Of the
// last 16 bytes a part may be past the operand's end; they lie in the same page, and scale nothing stored.
__device__ __forceinline__ bool side_by_side(const Parameters& p) {
  if ((p.a_scales_row != 1 && p.m > 1) || p.a_scales_k % 4 != 0 ||
      kTileM % 4 != 0 || reinterpret_cast<uint64_t>(p.a_scales) % 16 != 0)
    return false;
  return true;
}

__device__ __forceinline__ void copy_together(void* to, const void* from, uint32_t bytes, FullBarrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes),
               "r"(cute::cast_smem_ptr_to_uint(&full))
               : "memory");
}

// Elsewhere a warp copies those of a stage one by one, and its lanes arrive at the full barrier.
constexpr int kScaleWarps = 3, kScaleArrivals = 32;

__device__ __forceinline__ void copy_scale(const float* from, float* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from)
               : "memory");
}

// A lane's part in the scales of one stage is on its way or there.
__device__ __forceinline__ void arrive_scales(FullBarrier& full) {
  const uint32_t barrier = cute::cast_smem_ptr_to_uint(&full);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_scales(const Parameters& p, SharedStorage& shared, int rank,
                                            int cluster, int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int lane = threadIdx.x % 32;
  int turn = threadIdx.x / 32 - 1;  // k tiles until the warp's next: each has every third
  Position position{0, 1};
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, position.advance()) {
      if (turn-- > 0) continue;
      turn = kScaleWarps - 1;
      shared.empty[position.stage].wait(position.phase);
      Scales& to = shared.scales[position.stage];
      const int k = k_tile;
      // Past the end of an operand the last scales serve: what they multiply is not stored.
      CUTE_NO_UNROLL
      for (int i = lane; i < 32; i += 32) {
        const int row = min(at.m + i, p.m - 1);
        const int64_t from = row * p.a_scales_row + k * p.a_scales_k;
        copy_scale(p.a_scales + from, &to.columns[at.m % 4 + i]);
      }
      arrive_scales(shared.full[position.stage]);
    }
  }
}

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const bool together = side_by_side(p);
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    // Of rows past the end there are none but to fill 16 bytes: products of these are not stored.
    const int a_scales_first = at.m / 4 * 4;  // groups begin at any row, and copies at 16 bytes
    const int a_scales_rows =
        together ? max(0, min(32 + at.m, p.m) - a_scales_first) : 0;
    const int a_scales_bytes = (a_scales_rows + 3) / 4 * 16;
    CUTE_NO_UNROLL  // the producer has few registers
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(OperandA::kBytes + OperandB::kBytes +
                                a_scales_bytes);
      if (a_scales_bytes > 0)
        copy_together(shared.scales[position.stage].columns,
                      p.a_scales + a_scales_first + k_tile * p.a_scales_k,
                      a_scales_bytes, full);
      OperandA::load(p.a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, at.batch);
      position.advance();
    }
  }
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
using RowOperand = OperandB; using ColumnOperand = OperandA;
// What to add to a descriptor for the next stage, and for the next 64 rows.
constexpr int kStageRows = RowOperand::kBytes / 16, kStageColumns = ColumnOperand::kBytes / 16;
constexpr int kBlockRows = kStageRows * kWgmmaM / kRows;

// A descriptor of what begins `offset` times 16 bytes later. Nothing is carried into its upper half, which the
// compiler knows for this: the strides.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, int offset) {
  return descriptor >> 32 << 32 | (uint32_t(descriptor) + uint32_t(offset));
}

// A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
__device__ __forceinline__ void fence(Accumulator (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// Arrives at the empty barrier of a stage that this consumer has read.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  __syncwarp();  // all lanes have read their scales
  const uint32_t cta = threadIdx.x % 32;
  empty.arrive(cta, cta < kClusterSize);
}

// A block scale as fp32.
__device__ __forceinline__ float as_float(float scale) { return scale; }

// The main loop with two-level accumulation: the tensor core accumulates one k tile, in which every element has
// one scale of A and one of B; FFMAs multiply by these and add to fp32 registers.
struct Mainloop {
  static constexpr int kRowScales = 1;  // of 64 rows: all lie in one block of 128
  const int column;  // the first of a thread's columns of the tile, behind those before the group
  // Of blocks of 128 rows there are few: a thread reads those of the next k tile one k tile ahead.
  const float* row_scales;  // of the first k tile
  int k_tile = 0;  // that is read next
  float next_rows[kBlocks];
  int left;  // k tiles, with the next

  // For the tile at `at`, the consumer's first row, and `left` k tiles from `begin` on.
  __device__ __forceinline__ Mainloop(const Parameters& p, const TileCoord& at, int begin, int left, int first)
      : column(column_of(at.m % 4)), left(left) {
    const float* start = p.b_scales + min(begin, (p.k + kTileK - 1) / kTileK - 1) * p.b_scales_k;
    start += at.batch * p.b_scales_batch_pitch;
    const int block = min(at.n, p.n - 1) / 128;
    row_scales = start + block * p.b_scales_row;
    read(p, at);
    zero();
  }

  // Starts to read the scales of the next k tile.
  __device__ __forceinline__ void read(const Parameters& p, const TileCoord& at) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      const int start = min(at.n, p.n - 1) / 128;
      const int block = min(at.n + i * kWgmmaM, p.n - 1) / 128;
      next_rows[i] = row_scales[k_tile * p.b_scales_k + (block - start) * p.b_scales_row];
    }
  }

  __device__ __forceinline__ static int column_of(int before) {
    int column = before + threadIdx.x % 4 * 2;
    asm volatile("" : "+r"(column));  // keeps the compiler from computing it anew for each k tile
    return column;
  }

  __device__ __forceinline__ void zero() {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) accumulators[i / kCount][i % kCount] = 0;
  }

  static constexpr int kBanks = 1;  // accumulators of 64 rows that MMAs in flight may have
  Accumulator accumulators[kBlocks][kCount], partial[kBanks][kCount];

  // Issues the MMAs of one stage and 64 rows.
  __device__ __forceinline__ void issue(int block, uint64_t rows, uint64_t columns) {
    fence(partial[block % kBanks]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step)
      Wgmma::fma(moved(rows, block * kBlockRows + step * RowOperand::kStep),
                 moved(columns, step * ColumnOperand::kStep), partial[block % kBanks], step > 0);
    cute::warpgroup_commit_batch();
  }

  // Scales and adds the MMAs of the next stage, which each warp releases once it has read its last scale.
  // Returns whether `full` has passed `phase`: test_wait is issued before the FFMAs, which hide its latency.
  __device__ __forceinline__ bool next(const Parameters& p, const TileCoord& at, uint64_t rows,
                                       uint64_t columns, const Scales& scales, EmptyBarrier& empty,
                                       const FullBarrier& full, uint32_t phase) {
    CUTE_UNROLL
    for (int block = 0; block < kBanks; ++block) issue(block, rows, columns);
    float of_rows[kBlocks][kRowScales];
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kRowScales; ++i)
      of_rows[i][0] = as_float(next_rows[i]);
    k_tile += --left > 0;  // past the last it is read once more
    read(p, at);
    bool filled = false;
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block + 1 < kBlocks) cute::warpgroup_wait<kBanks - 1>();
      else cute::warpgroup_wait<0>();
      if (block + 1 == kBlocks) filled = full.test_wait(phase);
      fence(partial[block % kBanks]);
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float of_column = as_float(scales.columns[column + i / 4 * 8 + i % 2]);
        accumulators[block][i] +=
            partial[block % kBanks][i] * of_column * of_rows[block][i / 2 % 2 % kRowScales];
      }
      if (block + kBanks < kBlocks) issue(block + kBanks, rows, columns);
    }
    cute::tma_store_fence();  // orders these reads of scales before the next TMA load
    release(empty);
    return filled;
  }
};

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank,
                                        int cluster, int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = moved(matrix(shared.b[0], 0, 1024, 1), part * kBlocks * kBlockRows);
  const uint64_t columns = matrix(shared.a[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, rank);
    at.n += part * kBlocks * kWgmmaM;
    Mainloop mainloop(p, at, 0,
                      k_tiles, part * kBlocks);
    bool filled = false;  // whether the next stage was seen to be filled before the sums of the last
    CUTE_NO_UNROLL
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      if (!filled) shared.full[position.stage].wait(position.phase);
      Position following = position;
      following.advance();
      filled = mainloop.next(p, at, moved(rows, position.stage * kStageRows),
                             moved(columns, position.stage * kStageColumns), shared.scales[position.stage],
                             shared.empty[position.stage], shared.full[following.stage], following.phase);
      position = following;
    }
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

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e4m3_bf16_promoted_batched_row_block_groups_masked_32x128x128_stages10_swap_882d7dfb(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(side_by_side(p) ? 1 : 1 + kScaleArrivals);
      shared.empty[stage].init(kSharing * kClusterSize * 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
  shared.groups.fill(p);
  __syncthreads();  // every role reads it
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x >= 32) {
      if (!side_by_side(p)) copy_scales(p, shared, rank, cluster, clusters);
    } else if (threadIdx.x == 0) {
      produce(p, shared, rank, cluster, clusters);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}
