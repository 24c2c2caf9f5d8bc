// gemm_sm90a_e4m3_e5m2_fp32_promoted_batched_row_row_sa_e8m0_sb_e8m0_128x96x128_stages6_e81c03b2
//
// D[m, n] = A[m, k] B[k, n]
//   A e4m3 row, B e5m2 col, accumulated in fp32, D fp32 row
//   tile 128x96x128, cluster 1x1, 2 consumers, 6 stages, along_m, swizzle 8, store tma
// Digest e81c03b2eba49c795d88d2e14a1b4bd039202d8afb97cdac4208568079f8d675; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads; warps 1 to 3 copy block scales where TMA cannot.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 48 accumulators and 48 for one k tile.
//   Its epilogue takes 32 columns at a time, to save registers.
// Shared memory: 206240 bytes; the launch asks for 206848 of 232448
//   a, b         6 stages * (16384 + 12288) = 172032
//   staging      2 consumers * 2 buffers * 8192 = 32768
//   scales       6 stages * 224 = 1344
//   full, empty  6 stages * 2 * 8 = 96
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
using ElementD = float; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 128, kTileN = 96, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 2;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 6;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 128, kColumns = 96;  // of a tile, as wgmma sees it
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
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cute::TmaDescriptor d_map;  // D, in staging boxes
  const uint8_t* a_scales;  // a scale for each 1 m x 128 k of A
  const uint8_t* b_scales;  // a scale for each 1 n x 128 k of B
  int64_t a_scales_row;  // elements between those along m
  int64_t a_scales_k;  // elements between those along k
  int64_t a_scales_batch_pitch;  // elements between batches
  int64_t b_scales_row;  // elements between those along n
  int64_t b_scales_k;  // elements between those along k
  int64_t b_scales_batch_pitch;  // elements between batches
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t batches;  // of D
  int32_t a_batches;  // of A
  int32_t a_repeat;  // batches of D in a row that one of A serves
  int32_t b_batches;  // of B
  int32_t b_repeat;  // batches of D in a row that one of B serves
  int32_t a_scales_batch_count;  // batches of them
  int32_t a_scales_batch_repeat;  // batches of D in a row that one serves
  int32_t b_scales_batch_count;  // batches of them
  int32_t b_scales_batch_repeat;  // batches of D in a row that one serves
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, a_scales) == 512 && OFFSET(Parameters, b_scales) == 520);
static_assert(OFFSET(Parameters, a_scales_row) == 528 && OFFSET(Parameters, a_scales_k) == 536);
static_assert(OFFSET(Parameters, a_scales_batch_pitch) == 544 && OFFSET(Parameters, b_scales_row) == 552);
static_assert(OFFSET(Parameters, b_scales_k) == 560 && OFFSET(Parameters, b_scales_batch_pitch) == 568);
static_assert(OFFSET(Parameters, a_tail_rows) == 576 && OFFSET(Parameters, m) == 580);
static_assert(OFFSET(Parameters, n) == 584 && OFFSET(Parameters, k) == 588);
static_assert(OFFSET(Parameters, batches) == 592 && OFFSET(Parameters, a_batches) == 596);
static_assert(OFFSET(Parameters, a_repeat) == 600 && OFFSET(Parameters, b_batches) == 604);
static_assert(OFFSET(Parameters, b_repeat) == 608 && OFFSET(Parameters, a_scales_batch_count) == 612);
static_assert(OFFSET(Parameters, a_scales_batch_repeat) == 616 && OFFSET(Parameters, b_scales_batch_count) == 620);
static_assert(OFFSET(Parameters, b_scales_batch_repeat) == 624);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 96] += A[64 x 32] * B[32 x 96]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[48], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e5m2 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
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

// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k, int batch) {
    cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally,
        tile, k, m, batch);
  }
};

// B is K-major: a row of 128 bytes has the k tile of one n.
struct OperandB {
  static constexpr int kBytes = 12288;  // of one stage
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
  int batch;
};

// The tile scheduler. It counts in tiles of clusters.
struct Tiles {
  int rows, columns;
  int batches;

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : rows((p.m + kTileM * kClusterM - 1) / (kTileM * kClusterM)),
        columns((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)),
        batches(p.batches) {}

  __device__ __forceinline__ int count() const { return rows * columns * batches; }

  // The tile of the CTA with this rank.
  __device__ __forceinline__ TileCoord at(int index, int rank) const {
    const int batch = index / (rows * columns);
    index -= batch * rows * columns;
    // Tiles are taken in bands of kSwizzle rows, each column by column, so that the operands of tiles in flight
    // stay in L2. In a band of 2 rows the order is 0 2 4 over 1 3 5.
    const int band = index / (kSwizzle * columns);
    const int width = min(rows - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * columns;
    const int row = band * kSwizzle + offset % width, column = offset / width;
    return {(row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN, batch};
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two adjacent values of a row: D has their type.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) { return { {x[0], x[1]} }; }

// Stores D by TMA from two staging buffers per consumer: one is filled while TMA reads the other.
struct Store {
  static constexpr int kSpan = 128;  // bytes of a staging row
  static constexpr int kBytes = 64 * kSpan;
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
      const int column = at.n + chunk % kChunks * kChunkColumns, row = at.m + chunk / kChunks * kWgmmaM;
      cute::SM90_TMA_STORE_3D::copy(&p.d_map, buffer, column, row, at.batch);
      cute::tma_store_arrive();
    }
  }

  // Two neighbouring elements of a row at a time.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int offset = swizzled(row + i * 8, (f * 8 + lane % 4 * 2) * sizeof(ElementD));
        *reinterpret_cast<Pair*>(buffer + offset) = converted(x[f][i]);
      }
    }
  }

  // The CTA must not exit while TMA still reads its shared memory.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

// The block scales of one stage that single rows have: of the tile's rows of A and of B.
struct Scales {
  alignas(16) uint8_t columns[96];
  alignas(16) uint8_t rows[128];
};
static_assert(sizeof(Scales) == 224);

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[32768];
  Scales scales[kStages];
  FullBarrier full[kStages];    // all bytes and scales of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 206848);

// ---- Block scales: by TMA where it can, else by the other warps of the producer -------------------
// Whether TMA can copy them: those of one k lie side by side, and begin at multiples of 16 bytes. Of the
// last 16 bytes a part may be past the operand's end; they lie in the same page, and scale nothing stored.
__device__ __forceinline__ bool side_by_side(const Parameters& p) {
  if ((p.a_scales_row != 1 && p.m > 1) || p.a_scales_k % 16 != 0 ||
      kTileM % 16 != 0 || reinterpret_cast<uint64_t>(p.a_scales) % 16 != 0)
    return false;
  if (p.a_scales_batch_pitch % 16 != 0) return false;
  if ((p.b_scales_row != 1 && p.n > 1) || p.b_scales_k % 16 != 0 ||
      kTileN % 16 != 0 || reinterpret_cast<uint64_t>(p.b_scales) % 16 != 0)
    return false;
  if (p.b_scales_batch_pitch % 16 != 0) return false;
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

__device__ __forceinline__ void copy_scale(const uint8_t* from, uint8_t* to) { *to = *from; }

// A lane's part in the scales of one stage is on its way or there.
__device__ __forceinline__ void arrive_scales(FullBarrier& full) {
  const uint32_t barrier = cute::cast_smem_ptr_to_uint(&full);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_scales(const Parameters& p, SharedStorage& shared, int rank,
                                            int cluster, int clusters) {
  const Tiles tiles(p);
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
      for (int i = lane; i < 128; i += 32) {
        const int row = min(at.m + i, p.m - 1);
        const int batch = at.batch / p.a_scales_batch_repeat % p.a_scales_batch_count;
        const int64_t from = row * p.a_scales_row + k * p.a_scales_k + batch * p.a_scales_batch_pitch;
        copy_scale(p.a_scales + from, &to.rows[i]);
      }
      CUTE_NO_UNROLL
      for (int i = lane; i < 96; i += 32) {
        const int row = min(at.n + i, p.n - 1);
        const int batch = at.batch / p.b_scales_batch_repeat % p.b_scales_batch_count;
        const int64_t from = row * p.b_scales_row + k * p.b_scales_k + batch * p.b_scales_batch_pitch;
        copy_scale(p.b_scales + from, &to.columns[i]);
      }
      arrive_scales(shared.full[position.stage]);
    }
  }
}

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const bool together = side_by_side(p);
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    // An operand may have fewer batches than D: one serves `repeat` of them in a row, then the next.
    const int batch_a = at.batch / p.a_repeat % p.a_batches;
    const int batch_b = at.batch / p.b_repeat % p.b_batches;
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    const int a_scales_batch = at.batch / p.a_scales_batch_repeat % p.a_scales_batch_count;
    // Of rows past the end there are none but to fill 16 bytes: products of these are not stored.
    const int a_scales_rows = together ? max(0, min(128, p.m - at.m)) : 0;
    const int a_scales_bytes = (a_scales_rows + 15) / 16 * 16;
    const int b_scales_batch = at.batch / p.b_scales_batch_repeat % p.b_scales_batch_count;
    // Of rows past the end there are none but to fill 16 bytes: products of these are not stored.
    const int b_scales_rows = together ? max(0, min(96, p.n - at.n)) : 0;
    const int b_scales_bytes = (b_scales_rows + 15) / 16 * 16;
    CUTE_NO_UNROLL  // the producer has few registers
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes +
                                a_scales_bytes + b_scales_bytes);
      if (a_scales_bytes > 0)
        copy_together(shared.scales[position.stage].rows,
                      p.a_scales + at.m + k_tile * p.a_scales_k + a_scales_batch * p.a_scales_batch_pitch,
                      a_scales_bytes, full);
      if (b_scales_bytes > 0)
        copy_together(shared.scales[position.stage].columns,
                      p.b_scales + at.n + k_tile * p.b_scales_k + b_scales_batch * p.b_scales_batch_pitch,
                      b_scales_bytes, full);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK, batch_a);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, batch_b);
      position.advance();
    }
  }
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
using RowOperand = OperandA; using ColumnOperand = OperandB;
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

// A block scale as fp32. One of e8m0 is an exponent: 0 is 2^-127, which is denormal, and 255 is NaN.
__device__ __forceinline__ float as_float(uint8_t scale) {
  return __uint_as_float(scale == 255 ? 0x7fffffffu : max(uint32_t(scale) << 23, 0x00400000u));
}

// The main loop with two-level accumulation: the tensor core accumulates one k tile, in which every element has
// one scale of A and one of B; FFMAs multiply by these and add to fp32 registers.
struct Mainloop {
  static constexpr int kRowScales = 2;  // of 64 rows: those of a thread
  const int row;  // the first of a thread's rows of the tile

  __device__ __forceinline__ explicit Mainloop(int first) : row(row_of(first)) { zero(); }

  // The first row of a thread where its consumer's blocks of 64 rows begin at `first`.
  __device__ __forceinline__ static int row_of(int first) {
    int row = first * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    asm volatile("" : "+r"(row));  // keeps the compiler from computing it anew for each k tile
    return row;
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
    // Read before MMAs are issued: what waits for shared memory between them would make the tensor core wait.
    uint8_t next_rows[kBlocks][kRowScales];
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kRowScales; ++i)
      next_rows[i / kRowScales][i % kRowScales] = scales.rows[row + i / kRowScales * kWgmmaM + i % 2 * 8];
    CUTE_UNROLL
    for (int block = 0; block < kBanks; ++block) issue(block, rows, columns);
    float of_rows[kBlocks][kRowScales];
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kRowScales; ++i)
      of_rows[i / kRowScales][i % kRowScales] = as_float(next_rows[i / kRowScales][i % kRowScales]);
    const int lane = threadIdx.x % 32;
    bool filled = false;
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block + 1 < kBlocks) cute::warpgroup_wait<kBanks - 1>();
      else cute::warpgroup_wait<0>();
      if (block + 1 == kBlocks) filled = full.test_wait(phase);
      fence(partial[block % kBanks]);
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float of_column = as_float(scales.columns[i / 4 * 8 + lane % 4 * 2 + i % 2]);
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
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = moved(matrix(shared.a[0], 0, 1024, 1), part * kBlocks * kBlockRows);
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, rank);
    at.m += part * kBlocks * kWgmmaM;
    Mainloop mainloop(part * kBlocks);
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
          x[f][i / 2][i % 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
      }
      store(p, x, at, chunk);
    }
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e5m2_fp32_promoted_batched_row_row_sa_e8m0_sb_e8m0_128x96x128_stages6_e81c03b2(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.a_tail_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(side_by_side(p) ? 1 : 1 + kScaleArrivals);
      shared.empty[stage].init(kSharing * kClusterSize * 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
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
