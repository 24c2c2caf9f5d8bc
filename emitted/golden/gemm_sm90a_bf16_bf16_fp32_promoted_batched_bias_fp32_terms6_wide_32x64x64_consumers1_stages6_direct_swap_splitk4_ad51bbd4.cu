// gemm_sm90a_bf16_bf16_fp32_promoted_batched_bias_fp32_terms6_wide_32x64x64_consumers1_stages6_direct_swap_splitk4_ad51bbd4
//
// D[m, n] = epilogue(A[m, k] B[k, n]): bias_fp32
//   A bf16 row, B bf16 col, accumulated in fp32, D fp32 row
//   A and B in 3 pieces side by side along k, of which 6 products are added up, smallest first
//   tile 32x64x64, cluster 1x1, 1 consumer, 6 stages, along_m, swizzle 8, store direct
//   swapped: the rows of wgmma are columns of D, which is D' = B' A'
//   k in 4 parts, each a tile of its own: a second kernel adds them up, and has epilogue and store
// Digest ad51bbd431994d240e88604aebec3fdebd9c370502dc74ce856eaa7edf3d770d; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroup 1, the consumer: wgmma on 64 rows of the CTA's tile, then partial sums go to memory.
// The second kernel, of one warpgroup a CTA: adds up partial sums, then the epilogue.
// Registers per thread: at most 255, without setmaxnreg.
//   A consumer thread has 16 accumulators and 16 for one k tile.
// Shared memory: 221280 bytes; the launch asks for 222208 of 232448
//   a, b         6 stages * 3 pieces * (4096 + 8192) = 221184
//   full, empty  6 stages * 2 * 8 = 96
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  1 arrivals: 1 consumer
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
constexpr int kTileM = 32, kTileN = 64, kTileK = 64;
constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 1;  // consumer warpgroups
constexpr int kSharing = 1;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 6;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 64, kColumns = 32;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 16;  // columns of a block in one pass of the epilogue
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
  float* d;  // D[m][pitch]
  float* bias_0;  // bias[n]
  float* partial_tiles;  // sums of each part of k, by tiles
  const uint32_t* span_a;  // [4]: the most small or lost values of a row of A, the most lost, k
  const uint32_t* span_b;  // [4]: the most small or lost values of a row of B, the most lost, k
  int64_t d_pitch;  // elements between rows of D
  int64_t d_batch;  // elements between batches of D
  int64_t bias_0_batch;  // elements between batches of bias_0
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t k_parts;  // parts of k
  int32_t batches;  // of D
  int32_t a_batches;  // of A
  int32_t a_repeat;  // batches of D in a row that one of A serves
  int32_t b_batches;  // of B
  int32_t b_repeat;  // batches of D in a row that one of B serves
  int32_t piece_pitch;  // elements between pieces along k
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d) == 384);
static_assert(OFFSET(Parameters, bias_0) == 392 && OFFSET(Parameters, partial_tiles) == 400);
static_assert(OFFSET(Parameters, span_a) == 408 && OFFSET(Parameters, span_b) == 416);
static_assert(OFFSET(Parameters, d_pitch) == 424 && OFFSET(Parameters, d_batch) == 432);
static_assert(OFFSET(Parameters, bias_0_batch) == 440 && OFFSET(Parameters, a_tail_rows) == 448);
static_assert(OFFSET(Parameters, m) == 452 && OFFSET(Parameters, n) == 456);
static_assert(OFFSET(Parameters, k) == 460 && OFFSET(Parameters, k_parts) == 464);
static_assert(OFFSET(Parameters, batches) == 468 && OFFSET(Parameters, a_batches) == 472);
static_assert(OFFSET(Parameters, a_repeat) == 476 && OFFSET(Parameters, b_batches) == 480);
static_assert(OFFSET(Parameters, b_repeat) == 484 && OFFSET(Parameters, piece_pitch) == 488);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 32] += A[64 x 16] * B[16 x 32]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[16], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;\n}\n"
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

// Whether two fp16 pieces hold the values of A and B, as the launches that made them counted. Either no value
// lost bits, or each dot product has at least as many terms of two large values as it has with a lost one.
__device__ __forceinline__ bool pieces_hold(const Parameters& p) {
  // From L2: the launch that wrote them may have ended after this one began.
  const uint4 a = __ldcg(reinterpret_cast<const uint4*>(p.span_a));
  const uint4 b = __ldcg(reinterpret_cast<const uint4*>(p.span_b));
  return (a.y | b.y) == 0 || uint64_t(a.x) + b.x <= a.z;
}

// Whether this launch computes D, from bf16 pieces; else another one did, from fp16 pieces.
__device__ __forceinline__ bool computes_d(const Parameters& p) { return !pieces_hold(p); }

// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 4096;  // of one stage
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
  static constexpr int kBytes = 8192;  // of one stage
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

// A unit of work: the k tiles from `begin` to `end` of one tile, which are part `part` of its k.
struct Unit {
  int tile, part, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The split-K scheduler: the k tiles of every tile are split into p.k_parts parts, equal but for one k tile.
// The first parts of all tiles come first, then the second ones, so that units that run at the same time read
// A and B at the same k.
struct Walk {
  int tiles, k_tiles, parts, clusters;
  int following;  // the next unit

  __device__ __forceinline__ Walk(const Parameters& p, int tiles, int k_tiles, int cluster, int clusters)
      : tiles(tiles), k_tiles(k_tiles), parts(p.k_parts), clusters(clusters), following(cluster) {}

  // The first k tile of a part.
  __device__ __forceinline__ int start(int part) const {
    return part * (k_tiles / parts) + min(part, k_tiles % parts);
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (following >= tiles * parts) return false;
    const int part = following / tiles;
    unit = {following - part * tiles, part, start(part), start(part + 1)};
    following += clusters;
    return true;
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

// A fragment's two columns of a row of C or of a vector, read one by one; 0 past the last column.
template <class Element> struct Columns {
  Element value[2];

  Columns() = default;
  __device__ __forceinline__ Columns(const Element* row, const int (&column)[2], int n)
      : value{column[0] < n ? row[column[0]] : Element(0), column[1] < n ? row[column[1]] : Element(0)} {}

  __device__ __forceinline__ float operator[](int j) const { return float(value[j]); }
};

// Adds a vector over the columns of D.
template <class Element> struct Bias {
  const Element* bias;
  using Operand = Columns<Element>;

  __device__ __forceinline__ Operand load(const Coordinates& at, int, int n) const {
    return {bias, at.column, n};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] += operand[i % 2];
  }
};

// The steps from accumulators to D, in order. Operands of a block of 64 rows are loaded once a tile.
struct Epilogue {
  struct Block {
    Bias<float>::Operand step_0;
  };
  int m, n;  // past the last row and column
  Bias<float> step_0;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p, int batch)
      : m(p.m),
        n(p.n),
        step_0{p.bias_0 + batch * p.bias_0_batch} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {
        step_0.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block) {
    step_0.apply(x, block.step_0);
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two adjacent values of a row: D has their type.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) { return { {x[0], x[1]} }; }

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
        ElementD* row = p.d + at.batch * p.d_batch + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n) row[place.column[j]] = pair.value[j];
      }
    }
  }
};

struct SharedStorage {
  // A tile of each piece. 1024 is the period of a 128-byte swizzle.
  alignas(1024) uint8_t a[kStages][3 * OperandA::kBytes];
  alignas(1024) uint8_t b[kStages][3 * OperandB::kBytes];
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 222208);

// Four accumulators of a thread, in 64 rows by 8 columns: what one access moves.
struct alignas(16) Fragment { Accumulator value[4]; };

// The partial sums of one part of a tile's k, in memory in register order: 16 bytes a thread, coalesced.
// Fragments outside of D are neither written nor read.
struct PartialTile {
  static constexpr int kOfRows = kColumns / 8;             // fragments of 64 rows
  static constexpr int kThreads = 128;
  Fragment* const fragments;

  // Of a part of k, and of a CTA's tile among all `tiles` of D.
  __device__ __forceinline__ PartialTile(const Parameters& p, int part, int tile, int tiles)
      : fragments(reinterpret_cast<Fragment*>(p.partial_tiles) +
                  (int64_t(part) * tiles + tile) * (kRows / kWgmmaM * kOfRows * kThreads)) {}

  __device__ __forceinline__ Fragment* place(int row_block, int fragment) const {
    return fragments + (row_block * kOfRows + fragment) * kThreads + threadIdx.x % kThreads;
  }

  // Whether a thread has an element of D in a fragment: the first of its four, if any.
  __device__ __forceinline__ static bool inside(const Parameters& p, const Coordinates& at) {
    return at.row[0] < p.m && at.column[0] < p.n;
  }

  // Writes the accumulators of 64 rows: those of `block` of the consumer whose part of the tile starts at `at`.
  __device__ __forceinline__ void leave(const Parameters& p, const Accumulator (&accumulators)[kCount],
                                        const TileCoord& at, int row_block, int block) const {
    CUTE_UNROLL
    for (int i = 0; i < kOfRows; ++i) {
      const Coordinates there = coordinates(at, block * kChunks + i / kFragments, i % kFragments);
      const Accumulator* const sum = accumulators + i * 4;
      if (inside(p, there)) *place(row_block, i) = {sum[0], sum[1], sum[2], sum[3]};
    }
  }

  // ld.cg: other SMs wrote it, and L1 is not coherent. Zeros where the thread has nothing `inside` of D.
  __device__ __forceinline__ Fragment read(int row_block, int fragment, bool inside) const {
    Fragment found{};
    asm volatile("{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\n"
                 "@inside ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];\n}"
                 : "+f"(found.value[0]), "+f"(found.value[1]), "+f"(found.value[2]), "+f"(found.value[3])
                 : "l"(place(row_block, fragment)), "r"(int(inside))
                 : "memory");
    return found;
  }
};

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    const TileCoord at = tiles.at(unit.tile, rank);
    // An operand may have fewer batches than D: one serves `repeat` of them in a row, then the next.
    const int batch_a = at.batch / p.a_repeat % p.a_batches;
    const int batch_b = at.batch / p.b_repeat % p.b_batches;
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = unit.begin; k_tile < unit.end; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(3 * (a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes));
      CUTE_NO_UNROLL  // the producer has few registers
      for (int piece = 0; piece < 3; ++piece) {
        const int k = k_tile * kTileK + piece * p.piece_pitch;
        uint8_t* const a = shared.a[position.stage] + piece * OperandA::kBytes;
        uint8_t* const b = shared.b[position.stage] + piece * OperandB::kBytes;
        OperandA::load(a_map, full, a, at.m, k, batch_a);
        OperandB::load(p.b_map, full, b, at.n, k, batch_b);
      }
      position.advance();
    }
  }
}

// ---- Consumer: main loop over a part of k, whose partial sums are written to memory ------------------------
using RowOperand = OperandB; using ColumnOperand = OperandA;
// What to add to a descriptor for the next stage, and for the next 64 rows.
constexpr int kPieceRows = RowOperand::kBytes / 16, kPieceColumns = ColumnOperand::kBytes / 16;
constexpr int kStageRows = 3 * kPieceRows, kStageColumns = 3 * kPieceColumns;
constexpr int kBlockRows = kPieceRows * kWgmmaM / kRows;

// A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
__device__ __forceinline__ void fence(Accumulator (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// Arrives at the empty barrier of a stage that this consumer has read.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  const uint32_t cta = threadIdx.x % 128;
  empty.arrive(cta, cta < kClusterSize);
}

// The main loop's MMAs of one tile, with two-level accumulation: the tensor core truncates at each step along
// k, so it accumulates one k tile, which FADDs add to fp32 registers, rounding to nearest.
struct Mainloop {
  static constexpr int kBanks = 1;  // accumulators of 64 rows that MMAs in flight may have
  Accumulator accumulators[kBlocks][kCount], partial[kBanks][kCount];

  // Issues the products of a piece of A and one of B; the first overwrites what the bank has.
  __device__ __forceinline__ static void multiply(float (&bank)[kCount], uint64_t rows, uint64_t columns,
                                                  bool first) {
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step)
      Wgmma::fma(rows + step * RowOperand::kStep, columns + step * ColumnOperand::kStep, bank,
                 step > 0 || !first);
  }

  // Issues the products of one stage and 64 rows, of small pieces first.
  __device__ __forceinline__ void issue(int block, uint64_t rows, uint64_t columns) {
    fence(partial[block % kBanks]);
    cute::warpgroup_arrive();
    multiply(partial[block % kBanks], rows + block * kBlockRows + 0 * kPieceRows,
             columns + 2 * kPieceColumns, true);
    multiply(partial[block % kBanks], rows + block * kBlockRows + 1 * kPieceRows,
             columns + 1 * kPieceColumns, false);
    multiply(partial[block % kBanks], rows + block * kBlockRows + 2 * kPieceRows,
             columns + 0 * kPieceColumns, false);
    multiply(partial[block % kBanks], rows + block * kBlockRows + 0 * kPieceRows,
             columns + 1 * kPieceColumns, false);
    multiply(partial[block % kBanks], rows + block * kBlockRows + 1 * kPieceRows,
             columns + 0 * kPieceColumns, false);
    multiply(partial[block % kBanks], rows + block * kBlockRows + 0 * kPieceRows,
             columns + 0 * kPieceColumns, false);
    cute::warpgroup_commit_batch();
  }

  // Issues the first products of one stage, as many as there are banks.
  __device__ __forceinline__ void issue(uint64_t rows, uint64_t columns) {
    CUTE_UNROLL
    for (int block = 0; block < kBanks; ++block) issue(block, rows, columns);
  }

  // Waits for the products of one block after the other, and adds them to the sums.
  __device__ __forceinline__ void promote(uint64_t rows, uint64_t columns) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block + 1 < kBlocks) cute::warpgroup_wait<kBanks - 1>();
      else cute::warpgroup_wait<0>();
      fence(partial[block % kBanks]);
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) accumulators[block][i] += partial[block % kBanks][i];
      if (block + kBanks < kBlocks) issue(block + kBanks, rows, columns);
    }
  }

  __device__ __forceinline__ void first(uint64_t rows, uint64_t columns) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) accumulators[i / kCount][i % kCount] = 0;
    issue(rows, columns);
    promote(rows, columns);
  }

  // Adds the products of the next stage, and releases the stage before.
  __device__ __forceinline__ void next(uint64_t rows, uint64_t columns, EmptyBarrier& previous) {
    issue(rows, columns);
    release(previous);
    promote(rows, columns);
  }

  __device__ __forceinline__ void finish(EmptyBarrier& previous) { release(previous); }
};

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int part = consumer;
  const uint64_t rows = matrix(shared.b[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.a[0], 0, 1024, 1);
  Position position{0, 0};
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    TileCoord at = tiles.at(unit.tile, rank);
    at.n += part * kBlocks * kWgmmaM;
    Mainloop mainloop;
    int previous = position.stage;  // the stage that wgmma may still read
    shared.full[position.stage].wait(position.phase);
    mainloop.first(rows + position.stage * kStageRows, columns + position.stage * kStageColumns);
    position.advance();
    CUTE_NO_UNROLL
    for (int k_tile = 1; k_tile < unit.k_tiles(); ++k_tile) {
      shared.full[position.stage].wait(position.phase);
      mainloop.next(rows + position.stage * kStageRows, columns + position.stage * kStageColumns,
                    shared.empty[previous]);
      previous = position.stage;
      position.advance();
    }
    mainloop.finish(shared.empty[previous]);
    const PartialTile partial(p, unit.part, unit.tile * kClusterSize + rank, tiles.count() * kClusterSize);
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) partial.leave(p, mainloop.accumulators[i], at, part * kBlocks + i, i);
  }
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_bf16_bf16_fp32_promoted_batched_bias_fp32_terms6_wide_32x64x64_consumers1_stages6_direct_swap_splitk4_ad51bbd4(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.a_tail_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(kSharing * kClusterSize);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
  if (!computes_d(p)) return;
  if (warpgroup == 0) {
    if (threadIdx.x == 0) produce(p, shared, rank, cluster, clusters);
  } else {
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}

// ---- Reduction: a CTA adds up the partial sums of one chunk in the order of k; then epilogue and store ----
extern "C" __global__ void __launch_bounds__(128)
    gemm_sm90a_bf16_bf16_fp32_promoted_batched_bias_fp32_terms6_wide_32x64x64_consumers1_stages6_direct_swap_splitk4_ad51bbd4_reduction(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  constexpr int kOfTile = kRows / kWgmmaM * kChunks;  // CTAs of this grid for one tile
  // The largest number of parts, and how many of them a thread has in flight: 16 bytes of each fragment.
  constexpr int kParts = 4, kAtOnce = 8;
  const Tiles tiles(p);
  const int tile = blockIdx.x / kOfTile, piece = blockIdx.x % kOfTile;
  const int row_block = piece / kChunks, chunk = piece % kChunks;
  TileCoord at = tiles.at(tile / kClusterSize, tile % kClusterSize);
  at.n += row_block * kWgmmaM;
  if (at.m + chunk % kChunks * kChunkColumns >= p.m ||
      at.n + chunk / kChunks * kWgmmaM >= p.n) return;  // outside of D
  wait_for_previous_grid();  // whose partial sums are visible from here on
  if (!computes_d(p)) return;
  Store store;
  Epilogue epilogue(p, at.batch);
  const Epilogue::Block block = epilogue.load_block(coordinates(at, chunk, 0));
  Accumulator accumulators[kFragments][4] = {};
  bool inside[kFragments];
  CUTE_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    inside[f] = PartialTile::inside(p, coordinates(at, chunk, f));
  }
  CUTE_UNROLL
  for (int first = 0; first < kParts; first += kAtOnce) {
    Fragment found[kAtOnce][kFragments];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= kParts || first + i >= p.k_parts) break;
      const PartialTile partial(p, first + i, tile, tiles.count() * kClusterSize);
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f)
        found[i][f] = partial.read(row_block, chunk * kFragments + f, inside[f]);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= kParts || first + i >= p.k_parts) break;
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) accumulators[f][j] += found[i][f].value[j];
      }
    }
  }
  Value x[kFragments][2][2];
  CUTE_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[f][i % 2][i / 2] = Value(accumulators[f][i]);
    epilogue.apply(x[f], block);
  }
  store(p, x, at, chunk);
}
