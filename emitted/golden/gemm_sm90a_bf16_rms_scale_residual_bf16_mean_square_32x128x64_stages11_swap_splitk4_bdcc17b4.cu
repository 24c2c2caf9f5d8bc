// gemm_sm90a_bf16_rms_scale_residual_bf16_mean_square_32x128x64_stages11_swap_splitk4_bdcc17b4
//
// D[m, n] = epilogue(A[m, k] B[k, n]): rms_scale, residual_bf16, mean_square
//   A bf16 row, B bf16 col, accumulated in fp32, D bf16 row
//   tile 32x128x64, cluster 1x1, 2 consumers, 11 stages, along_m, swizzle 8, store tma
//   swapped: the rows of wgmma are columns of D, which is D' = B' A'
//   k in 4 parts, each a tile of its own: a second kernel adds them up, and has epilogue and store
// Digest bdcc17b42b74bd476902abe704e494cb621d3329e2c4649cb9075b3c0b652e90; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then partial sums go to memory.
// The second kernel, of one warpgroup a CTA: adds up partial sums, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 16 accumulators.
// Shared memory: 225456 bytes; the launch asks for 226304 of 232448
//   a, b         11 stages * (4096 + 16384) = 225280
//   full, empty  11 stages * 2 * 8 = 176
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  2 arrivals: 2 consumers
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
constexpr int kTileM = 32, kTileN = 128, kTileK = 64;
constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 2;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 11;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 128, kColumns = 32;  // of a tile, as wgmma sees it
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
  cute::TmaDescriptor d_map;  // D, in staging boxes
  const float* rms_scale_0;  // shares[m][pitch], one for each 16 of k
  cutlass::bfloat16_t* residual_1;  // C[m][pitch]
  float* mean_square_2;  // shares[m][pitch]
  float* partial_tiles;  // sums of each part of k, by tiles
  int64_t rms_scale_0_pitch;  // elements between rows of shares
  int64_t residual_1_pitch;  // elements between rows of C
  int64_t mean_square_2_pitch;  // elements between rows of shares
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t k_parts;  // parts of k
  float rms_scale_0_eps;  // added to a mean of squares
  float residual_1_beta;  // C is not read when this is 0
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, rms_scale_0) == 512 && OFFSET(Parameters, residual_1) == 520);
static_assert(OFFSET(Parameters, mean_square_2) == 528 && OFFSET(Parameters, partial_tiles) == 536);
static_assert(OFFSET(Parameters, rms_scale_0_pitch) == 544 && OFFSET(Parameters, residual_1_pitch) == 552);
static_assert(OFFSET(Parameters, mean_square_2_pitch) == 560 && OFFSET(Parameters, a_tail_rows) == 568);
static_assert(OFFSET(Parameters, m) == 572 && OFFSET(Parameters, n) == 576);
static_assert(OFFSET(Parameters, k) == 580 && OFFSET(Parameters, k_parts) == 584);
static_assert(OFFSET(Parameters, rms_scale_0_eps) == 588 && OFFSET(Parameters, residual_1_beta) == 592);

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

// Divides each row by the root of a mean of squares, of which `shares` has one for each 16 of k.
struct RmsScale {
  const float* shares;
  int64_t pitch;
  float eps;
  const float* factors = nullptr;  // of rows from `first` on, in shared memory
  int first = -1;
  static constexpr int kColumns = 16;
  struct Operand {
    float row[2];
  };

  // Adds up the shares of kRows rows of D from `row` on, before the products of their tile: kThreads threads
  // meet at `barrier`, and leave a factor for each row in `shared`.
  template <int kRows, int kThreads>
  __device__ __forceinline__ void prepare(float* shared, int row, int m, int k, int barrier) {
    if (row == first) return;  // those of the tile before
    constexpr int kWarps = kThreads / 32, kAtOnce = kRows > kWarps ? 2 : 1, kGroups = 8;  // in flight
    const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, groups = (k - 1) / kColumns + 1;
    first = row;
    factors = shared;
    cutlass::arch::NamedBarrier::sync(kThreads, barrier);  // all have read the factors of the tile before
    CUTE_NO_UNROLL
    for (int i = warp; i < kRows && row + i < m; i += kAtOnce * kWarps) {
      const float* from[kAtOnce];
      float sum[kAtOnce] = {};
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) from[j] = shares + min(row + i + j * kWarps, m - 1) * pitch;
      CUTE_NO_UNROLL
      for (int group = lane; group < groups; group += 32 * kGroups) {
        float share[kGroups * kAtOnce];  // past the end of the last group: predicates are few
        CUTE_UNROLL
        for (int j = 0; j < kGroups * kAtOnce; ++j)
          share[j] = from[j % kAtOnce][min(group + j / kAtOnce * 32, groups - 1)];
        CUTE_UNROLL
        for (int j = 0; j < kGroups * kAtOnce; ++j)
          sum[j % kAtOnce] += group + j / kAtOnce * 32 < groups ? share[j] : 0.f;
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        CUTE_UNROLL
        for (int lanes = 16; lanes > 0; lanes /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], lanes);
        if (lane == 0 && i + j * kWarps < kRows) shared[i + j * kWarps] = rsqrtf(sum[j] + eps);
      }
    }
    cutlass::arch::NamedBarrier::sync(kThreads, barrier);
  }

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int) const {
    return {at.row[0] < m ? factors[at.row[0] - first] : 0.f, at.row[1] < m ? factors[at.row[1] - first] : 0.f};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= operand.row[i / 2];
  }
};

// Adds beta * C. C may be D itself: a thread reads its elements before any thread stores to them.
template <class Element> struct Residual {
  const Element* c;
  int64_t pitch;
  float beta;
  struct Operand {
    Columns<Element> row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    // A row that does not exist, and any row when beta is 0, has no columns.
    const int n0 = at.row[0] < m && beta != 0.f ? n : 0, n1 = at.row[1] < m && beta != 0.f ? n : 0;
    return {Columns<Element>(c + at.row[0] * pitch, at.column, n0),
            Columns<Element>(c + at.row[1] * pitch, at.column, n1)};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      x[i / 2][i % 2] = fmaf(beta, operand.row[i / 2][i % 2], x[i / 2][i % 2]);
  }
};

// Stores what each 16 columns of D add to the mean of squares of their row: shares [m][groups].
struct MeanSquare {
  float* shares;
  int64_t pitch;
  static constexpr int kColumns = 16;
  static constexpr int kEach = 1;  // fragments of a group: a warp's 16 rows of wgmma are its columns
  // Lanes from kFirst to kLast apart have other columns of the same rows.
  static constexpr int kFirst = 4, kLast = 16;

  // Of a chunk that is stored next. What lies outside of D [m, n] does not count.
  __device__ __forceinline__ void add(const float (&x)[kFragments][2][2], const TileCoord& at, int chunk, int m,
                                      int n) const {
    static_assert(kFragments % kEach == 0, "a chunk has whole groups");
    const float of_mean = __fdividef(1.f, float(n));
    const bool second = threadIdx.x & kFirst;  // of the rows: half of the lanes go on with each
    const bool last = (threadIdx.x & (2 * kLast - 2 * kFirst)) == 0;
    CUTE_UNROLL
    for (int first = 0; first < kFragments; first += kEach) {
      float sum[2] = {0.f, 0.f};
      CUTE_UNROLL
      for (int f = first; f < first + kEach; ++f) {
        const Coordinates place = coordinates(at, chunk, f);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float value = place.column[i % 2] < n ? x[f][i / 2][i % 2] : 0.f;
          sum[i / 2] = fmaf(value, value, sum[i / 2]);
        }
      }
      float total = second ? sum[1] : sum[0];
      total += __shfl_xor_sync(~0u, second ? sum[0] : sum[1], kFirst);
      CUTE_UNROLL
      for (int lanes = 2 * kFirst; lanes <= kLast; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
      const Coordinates place = coordinates(at, chunk, first);
      int row = second ? place.row[1] : place.row[0];
      asm volatile("" : "+r"(row));  // else addresses are kept for the next 64 rows, and spill
      const int group = place.column[0] / kColumns;
      if (last && row < m && group * kColumns < n) shares[row * pitch + group] = total * of_mean;
    }
  }
};

// The steps from accumulators to D, in order.
// Operands of a chunk are loaded a chunk ahead, so that the main loop or the chunk before hides their latency.
struct Epilogue {
  struct Operands {
    RmsScale::Operand step_0;
    Residual<cutlass::bfloat16_t>::Operand step_1;
  };
  int m, n;  // past the last row and column
  RmsScale step_0;
  Residual<cutlass::bfloat16_t> step_1;
  MeanSquare step_2;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.rms_scale_0, p.rms_scale_0_pitch, p.rms_scale_0_eps},
        step_1{p.residual_1, p.residual_1_pitch, p.residual_1_beta},
        step_2{p.mean_square_2, p.mean_square_2_pitch} {}

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_0.load(at, m, n),
        step_1.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Operands& operands) {
    step_0.apply(x, operands.step_0);
    step_1.apply(x, operands.step_1);
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
  static constexpr int kBytes = 16 * kSpan;
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
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 226304);

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
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = unit.begin; k_tile < unit.end; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK);
      position.advance();
    }
  }
}

// ---- Consumer: main loop over a part of k, whose partial sums are written to memory ------------------------
using RowOperand = OperandB; using ColumnOperand = OperandA;
// What to add to a descriptor for the next stage, and for the next 64 rows.
constexpr int kStageRows = RowOperand::kBytes / 16, kStageColumns = ColumnOperand::kBytes / 16;
constexpr int kBlockRows = kStageRows * kWgmmaM / kRows;

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

// The main loop's MMAs of one tile; the tensor core accumulates over all of k.
struct Mainloop {
  Accumulator accumulators[kBlocks][kCount];

  // Issues the MMAs of one stage, and does not wait for them.
  __device__ __forceinline__ void issue(uint64_t rows, uint64_t columns, bool add) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(accumulators[block]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step) {
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        Wgmma::fma(rows + block * kBlockRows + step * RowOperand::kStep, columns + step * ColumnOperand::kStep,
                   accumulators[block], add || step > 0);
    }
    cute::warpgroup_commit_batch();
  }

  // Issues the MMAs of the next stage, and releases the stage before once its own are done.
  __device__ __forceinline__ void next(uint64_t rows, uint64_t columns, EmptyBarrier& previous) {
    issue(rows, columns, true);
    cute::warpgroup_wait<1>();  // all but the batch just committed: the previous stage is read
    release(previous);
  }

  __device__ __forceinline__ void finish(EmptyBarrier& previous) {
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(accumulators[block]);
    release(previous);
  }
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
    mainloop.issue(rows + position.stage * kStageRows, columns + position.stage * kStageColumns, false);
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
    gemm_sm90a_bf16_rms_scale_residual_bf16_mean_square_32x128x64_stages11_swap_splitk4_bdcc17b4(const __grid_constant__ Parameters p) {
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
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared, rank, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}

// ---- Reduction: a CTA adds up the partial sums of one chunk in the order of k; then epilogue and store ----
extern "C" __global__ void __launch_bounds__(128)
    gemm_sm90a_bf16_rms_scale_residual_bf16_mean_square_32x128x64_stages11_swap_splitk4_bdcc17b4_reduction(const __grid_constant__ Parameters p) {
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
  if (threadIdx.x == 0) cute::prefetch_tma_descriptor(&p.d_map);
  wait_for_previous_grid();  // whose partial sums are visible from here on
  Store store(dynamic_shared, 0);
  Epilogue epilogue(p);
  epilogue.step_0.prepare<kChunkColumns, 128>(
      reinterpret_cast<float*>(dynamic_shared + 4096), at.m + chunk % kChunks * kChunkColumns, p.m, p.k, 6);
  Epilogue::Operands operands[kFragments];
  Accumulator accumulators[kFragments][4] = {};
  bool inside[kFragments];
  CUTE_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    inside[f] = PartialTile::inside(p, coordinates(at, chunk, f));
    operands[f] = epilogue.load(coordinates(at, chunk, f));
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
    epilogue.apply(x[f], operands[f]);
  }
  epilogue.step_2.add(x, at, chunk, p.m, p.n);
  store(p, x, at, chunk);
  store.finish();
}
