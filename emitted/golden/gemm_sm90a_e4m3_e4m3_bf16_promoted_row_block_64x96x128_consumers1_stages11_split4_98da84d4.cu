// gemm_sm90a_e4m3_e4m3_bf16_promoted_row_block_64x96x128_consumers1_stages11_split4_98da84d4
//
// D[m, n] = A[m, k] B[k, n]
//   A e4m3 row, B e4m3 col, accumulated in fp32, D bf16 row
//   tile 64x96x128, cluster 1x1, 1 consumer, k split over 4 CTAs, 11 stages, along_m, swizzle 8, store tma
// Digest 98da84d423e618f9169efd85987155d03f1091d3938793a6aa6a5c6a85752e4a; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads; warps 1 to 3 copy block scales where TMA cannot.
// Warpgroup 1, the consumer: wgmma on 64 rows of the CTA's tile, then the epilogue.
// Registers per thread: at most 255, without setmaxnreg.
//   A consumer thread has 48 accumulators and 96 for one k tile.
//   Its epilogue takes 8 columns at a time, to save registers.
// Shared memory: 230320 bytes; the launch asks for 230400 of 232448
//   a, b         11 stages * (8192 + 12288) = 225280
//   staging      1 consumer * 2 buffers * 1024 = 2048
//   scales       11 stages * 256 = 2816
//   full, empty  11 stages * 2 * 8 = 176
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes, and scale copies
// empty       the producer     a stage while wgmma reads it  4 arrivals: 4 consumer warps
// named 1     all that arrive  its staging buffers           128 threads of a consumer
// named 5     all that arrive  stages, reused below          128 threads of consumers
// cluster     all that arrive  accumulators kept in stages   all threads of 4 CTAs
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
constexpr int kTileM = 64, kTileN = 96, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 4, kClusterSize = kSplit;  // CTAs of a cluster that split a tile's k
constexpr int kConsumers = 1;  // consumer warpgroups
constexpr int kSharing = 1;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 11;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 64, kColumns = 96;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kFinished = kColumns / kSplit;  // columns of the tile that one CTA stores
constexpr int kChunkColumns = 8;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kFinished / kChunkColumns;
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
  const float* a_scales;  // a scale for each 1 m x 128 k of A
  const float* b_scales;  // a scale for each 128 n x 128 k of B
  int64_t a_scales_row;  // elements between those along m
  int64_t a_scales_k;  // elements between those along k
  int64_t b_scales_row;  // elements between those along n
  int64_t b_scales_k;  // elements between those along k
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, a_scales) == 512 && OFFSET(Parameters, b_scales) == 520);
static_assert(OFFSET(Parameters, a_scales_row) == 528 && OFFSET(Parameters, a_scales_k) == 536);
static_assert(OFFSET(Parameters, b_scales_row) == 544 && OFFSET(Parameters, b_scales_k) == 552);
static_assert(OFFSET(Parameters, a_tail_rows) == 560 && OFFSET(Parameters, m) == 564);
static_assert(OFFSET(Parameters, n) == 568 && OFFSET(Parameters, k) == 572);

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
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
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
  static constexpr int kBytes = 8192;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, m);
  }
};

// B is K-major: a row of 128 bytes has the k tile of one n.
struct OperandB {
  static constexpr int kBytes = 12288;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (n, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, n);
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
};

// The tile scheduler. It counts in tiles of clusters.
struct Tiles {
  int rows, columns;

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : rows((p.m + kTileM * kClusterM - 1) / (kTileM * kClusterM)),
        columns((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)) {}

  __device__ __forceinline__ int count() const { return rows * columns; }

  // The tile of the CTA with this rank.
  __device__ __forceinline__ TileCoord at(int index, int rank) const {
    // Tiles are taken in bands of kSwizzle rows, each column by column, so that the operands of tiles in flight
    // stay in L2. In a band of 2 rows the order is 0 2 4 over 1 3 5.
    const int band = index / (kSwizzle * columns);
    const int width = min(rows - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * columns;
    const int row = band * kSwizzle + offset % width, column = offset / width;
    return {(row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN};
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
  static constexpr int kSpan = 16;  // bytes of a staging row
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
      cute::SM90_TMA_STORE_2D::copy(&p.d_map, buffer, column, row);
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

// The block scales of one stage that single rows have: of the tile's rows of A.
struct Scales {
  alignas(16) float rows[64];
};
static_assert(sizeof(Scales) == 256);

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[2048];
  Scales scales[kStages];
  FullBarrier full[kStages];    // all bytes and scales of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 230400);

// Four accumulators of a thread, in 64 rows by 8 columns: what one access moves.
struct alignas(16) Fragment { Accumulator value[4]; };

// The reduction of a tile whose k the CTAs of a cluster split. Each CTA writes its accumulators to its own
// shared memory, over the stages, and adds up all CTAs' of the columns that it stores, in a fixed order.
struct SplitSums {
  static constexpr int kFragmentsOfTile = kColumns / 8, kFragmentsFinished = kFinished / 8;
  static_assert(sizeof(Fragment[kSharing * kBlocks * kFragmentsOfTile * 128])
                <= kStages * (OperandA::kBytes + OperandB::kBytes));
  Accumulator accumulators[kBlocks][kFinished / 2];

  // Cluster barriers of all threads, the producer's too: writes before the arrival are visible after the wait.
  __device__ __forceinline__ static void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ __forceinline__ static void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  __device__ __forceinline__ static void meet() {
    arrive();
    wait();
  }

  // The index of a thread's part of a fragment, the same in every CTA.
  __device__ __forceinline__ static int place(int consumer, int block, int fragment) {
    return ((consumer * kBlocks + block) * kFragmentsOfTile + fragment) * 128 + threadIdx.x % 128;
  }

  // Reads `address` in the shared memory of the CTA with that rank. Volatile: it stays between the barriers.
  __device__ __forceinline__ static Fragment read(uint32_t address, int rank) {
    Fragment found;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [there];\n}"
                 : "=f"(found.value[0]), "=f"(found.value[1]), "=f"(found.value[2]), "=f"(found.value[3])
                 : "r"(address), "r"(rank));
    return found;
  }

  __device__ __forceinline__ SplitSums(void* stages, const Accumulator (&parts)[kBlocks][kCount], int consumer,
                                       int rank) {
    Fragment* const fragments = static_cast<Fragment*>(stages);
    cutlass::arch::NamedBarrier::sync(kConsumers * 128, 5);  // no MMA of this CTA reads the stages any more
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kFragmentsOfTile; ++i) {
      const int block = i / kFragmentsOfTile, fragment = i % kFragmentsOfTile;
      const Accumulator* const part = parts[block] + fragment * 4;
      fragments[place(consumer, block, fragment)] = {part[0], part[1], part[2], part[3]};
    }
    meet();
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kFragmentsFinished; ++i) {
      const int block = i / kFragmentsFinished, fragment = i % kFragmentsFinished;
      const uint32_t address =
          cute::cast_smem_ptr_to_uint(fragments + place(consumer, block, rank * kFragmentsFinished + fragment));
      Fragment found[kSplit];
      CUTE_UNROLL
      for (int other = 0; other < kSplit; ++other) found[other] = read(address, other);
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        Accumulator& sum = accumulators[block][fragment * 4 + j] = found[0].value[j];
        CUTE_UNROLL
        for (int other = 1; other < kSplit; ++other) sum += found[other].value[j];
      }
    }
    cute::tma_store_fence();  // orders these generic accesses before the next TMA loads into the stages
    arrive();
  }

  // No CTA loads into its stages, or exits, before all have read from it.
  __device__ __forceinline__ void finish() const { wait(); }
};

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
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int first = rank * k_tiles;
  const int loads = side_by_side(p) ? 0 : k_tiles;  // or these warps only meet the cluster
  const int lane = threadIdx.x % 32;
  int turn = threadIdx.x / 32 - 1;  // k tiles until the warp's next: each has every third
  Position position{0, 1};
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, 0);
    for (int k_tile = 0; k_tile < loads; ++k_tile, position.advance()) {
      if (turn-- > 0) continue;
      turn = kScaleWarps - 1;
      shared.empty[position.stage].wait(position.phase);
      Scales& to = shared.scales[position.stage];
      const int k = first + k_tile;
      if (k * kTileK >= p.k) {  // what they multiply is zeros
        for (int i = lane; i < sizeof(Scales) / 4; i += 32) reinterpret_cast<uint32_t*>(&to)[i] = 0;
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                     ::"r"(cute::cast_smem_ptr_to_uint(&shared.full[position.stage]))
                     : "memory");
        continue;
      }
      // Past the end of an operand the last scales serve: what they multiply is not stored.
      CUTE_NO_UNROLL
      for (int i = lane; i < 64; i += 32) {
        const int row = min(at.m + i, p.m - 1);
        const int64_t from = row * p.a_scales_row + k * p.a_scales_k;
        copy_scale(p.a_scales + from, &to.rows[i]);
      }
      arrive_scales(shared.full[position.stage]);
    }
    __syncwarp();
    SplitSums::meet();  // all accumulators are written over the stages
    SplitSums::meet();  // and read: stages may be filled again
  }
}

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int first = rank * k_tiles;  // past the end of k, TMA fills stages with zeros
  const int loads = threadIdx.x == 0 ? k_tiles : 0;  // the other threads only meet the cluster
  const bool together = side_by_side(p);
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, 0);
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    // Of rows past the end there are none but to fill 16 bytes: products of these are not stored.
    const int a_scales_rows = together ? max(0, min(64, p.m - at.m)) : 0;
    const int a_scales_bytes = (a_scales_rows + 3) / 4 * 16;
    CUTE_NO_UNROLL  // the producer has few registers
    for (int k_tile = 0; k_tile < loads; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      const bool any = (first + k_tile) * kTileK < p.k;
      if (together && !any) {  // what the scales multiply is zeros
        uint32_t* const words = reinterpret_cast<uint32_t*>(&shared.scales[position.stage]);
        for (int i = 0; i < sizeof(Scales) / 4; ++i) words[i] = 0;
        cute::tma_store_fence();  // before TMA writes there again
      }
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes +
                                (any ? a_scales_bytes : 0));
      if (any && a_scales_bytes > 0)
        copy_together(shared.scales[position.stage].rows,
                      p.a_scales + at.m + (first + k_tile) * p.a_scales_k,
                      a_scales_bytes, full);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, (first + k_tile) * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, (first + k_tile) * kTileK);
      position.advance();
    }
    __syncwarp();
    SplitSums::meet();  // all accumulators are written over the stages
    SplitSums::meet();  // and read: stages may be filled again
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
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// A block scale as fp32.
__device__ __forceinline__ float as_float(float scale) { return scale; }

// The main loop with two-level accumulation: the tensor core accumulates one k tile, in which every element has
// one scale of A and one of B; FFMAs multiply by these and add to fp32 registers.
// Two banks of first-level accumulators: the MMAs of a k tile run while those of the one before are scaled.
struct Mainloop {
  static constexpr int kRowScales = 2;  // of 64 rows: those of a thread
  static constexpr int kColumnScales = 2;
  static constexpr int kFactorColumns = 32;  // columns that surely share a block of scales
  static constexpr int kFactors = 3;
  const int row;  // the first of a thread's rows of the tile
  // Of blocks of 128 columns there are few: a thread reads those of the next k tile one k tile ahead.
  const float* column_scales;  // of the first k tile
  int k_tile = 0;  // that is read next
  float next_columns[kColumnScales];
  int64_t apart;  // the two scales of a tile, of blocks of columns or of gate and up
  int left;  // k tiles, with the next; what may be multiplied behind them is zeros
  int edge;  // the first column of the tile that lies in the second block

  // For the tile at `at`, the consumer's first row, and `left` k tiles from `begin` on.
  __device__ __forceinline__ Mainloop(const Parameters& p, const TileCoord& at, int begin, int left, int first)
      : row(row_of(first)), left(left) {
    const float* start = p.b_scales + min(begin, (p.k + kTileK - 1) / kTileK - 1) * p.b_scales_k;
    const int block = min(at.n, p.n - 1) / 128;
    column_scales = start + block * p.b_scales_row;
    apart = block < (p.n - 1) / 128 ? p.b_scales_row : 0;  // past the end the last serves
    edge = 128 - at.n % 128;
    read(p, at);
    zero();
  }

  // Starts to read the scales of the next k tile.
  __device__ __forceinline__ void read(const Parameters& p, const TileCoord& at) {
    next_columns[0] = column_scales[k_tile * p.b_scales_k];
    next_columns[1] = column_scales[k_tile * p.b_scales_k + apart];
  }

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

  static_assert(kBlocks == 1);
  Accumulator accumulators[kBlocks][kCount], partial[2][kCount];

  // Issues the MMAs of one stage.
  template <int kBank>
  __device__ __forceinline__ void issue(uint64_t rows, uint64_t columns) {
    fence(partial[kBank]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step)
      Wgmma::fma(moved(rows, step * RowOperand::kStep), moved(columns, step * ColumnOperand::kStep),
                 partial[kBank], step > 0);
    cute::warpgroup_commit_batch();
  }

  // Issues the MMAs of the next stage into the other bank, if there is one, and scales and adds those of the
  // stage before, which each warp then releases.
  template <int kBank, bool kIssues>
  __device__ __forceinline__ void add(const Parameters& p, const TileCoord& at, const Scales& scales,
                                      EmptyBarrier& empty, uint64_t rows = 0,
                                      uint64_t columns = 0) {
    // Read before MMAs are issued: what waits for shared memory between them would make the tensor core wait.
    float next_rows[kBlocks][kRowScales];
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kRowScales; ++i)
      next_rows[i / kRowScales][i % kRowScales] = scales.rows[row + i / kRowScales * kWgmmaM + i % 2 * 8];
    if constexpr (kIssues) issue<1 - kBank>(rows, columns);
    float of_rows[kBlocks][kRowScales];
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kRowScales; ++i)
      of_rows[i / kRowScales][i % kRowScales] = as_float(next_rows[i / kRowScales][i % kRowScales]);
    float factors[kBlocks][kRowScales][kFactors];
    CUTE_UNROLL
    for (int j = 0; j < kFactors; ++j) {
      const float of_columns = as_float(j * kFactorColumns < edge ? next_columns[0] : next_columns[1]);
      CUTE_UNROLL
      for (int i = 0; i < kBlocks * kRowScales; ++i) {
        const int block = i / kRowScales, row = i % kRowScales;
        factors[block][row][j] = left <= 0 ? 0 : of_rows[block][row] * of_columns;
      }
    }
    k_tile += --left > 0;  // past the last it is read once more
    read(p, at);
    cute::warpgroup_wait<kIssues>();
    fence(partial[kBank]);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int row = i / 2 % 2 % kRowScales;  // of the thread's, see `coordinates`
      accumulators[0][i] += partial[kBank][i] * factors[0][row][i / 4 * 8 / kFactorColumns];
    }
    cute::tma_store_fence();  // orders these reads of scales before the next TMA load
    release(empty);
  }
};

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = moved(matrix(shared.a[0], 0, 1024, 1), part * kBlocks * kBlockRows);
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, 0);
    at.m += part * kBlocks * kWgmmaM;
    Mainloop mainloop(p, at, rank * k_tiles,
                      min(k_tiles, (p.k + kTileK - 1) / kTileK - (rank * k_tiles)), part * kBlocks);
    at.n += rank * kFinished;
    int previous = position.stage;  // the stage that wgmma may still read
    int k_tile = 1;                 // the next
    shared.full[position.stage].wait(position.phase);
    mainloop.issue<0>(moved(rows, position.stage * kStageRows), moved(columns, position.stage * kStageColumns));
    position.advance();
    CUTE_NO_UNROLL
    for (; k_tile < k_tiles - 1; k_tile += 2) {
      shared.full[position.stage].wait(position.phase);
      mainloop.add<0, true>(p, at, shared.scales[previous], shared.empty[previous],
                            moved(rows, position.stage * kStageRows),
                            moved(columns, position.stage * kStageColumns));
      previous = position.stage;
      position.advance();
      shared.full[position.stage].wait(position.phase);
      mainloop.add<1, true>(p, at, shared.scales[previous], shared.empty[previous],
                            moved(rows, position.stage * kStageRows),
                            moved(columns, position.stage * kStageColumns));
      previous = position.stage;
      position.advance();
    }
    const bool odd = k_tile < k_tiles;  // the last is in the second bank
    if (odd) {
      shared.full[position.stage].wait(position.phase);
      mainloop.add<0, true>(p, at, shared.scales[previous], shared.empty[previous],
                            moved(rows, position.stage * kStageRows),
                            moved(columns, position.stage * kStageColumns));
      previous = position.stage;
      position.advance();
    }
    if (odd) mainloop.add<1, false>(p, at, shared.scales[previous], shared.empty[previous]);
    else mainloop.add<0, false>(p, at, shared.scales[previous], shared.empty[previous]);
    SplitSums total(shared.a, mainloop.accumulators, part, rank);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i / 2][i % 2] = Value(total.accumulators[chunk / kChunks][sum]);
        }
      }
      store(p, x, at, chunk);
    }
    total.finish();
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e4m3_bf16_promoted_row_block_64x96x128_consumers1_stages11_split4_98da84d4(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.a_tail_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(side_by_side(p) ? 1 : 1 + kScaleArrivals);
      shared.empty[stage].init(kSharing * 4);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
  if (warpgroup == 0) {
    if (threadIdx.x >= 32) {
      copy_scales(p, shared, rank, cluster, clusters);
    } else {
      produce(p, shared, rank, cluster, clusters);
    }
  } else {
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}
