// gemm_sm90a_fp16_batched_relu_gradient_fp16_gelu_gradient_fp16_column_sum_32x128x64_stages10_swap_5fea3166
//
// D[m, n] = epilogue(A[m, k] B[k, n]): relu_gradient_fp16, gelu_gradient_fp16, column_sum
//   A fp16 row, B fp16 col, accumulated in fp32, D fp16 row
//   tile 32x128x64, cluster 1x1, 2 consumers, 10 stages, along_m, swizzle 8, store tma
//   swapped: the rows of wgmma are columns of D, which is D' = B' A'
// Digest 5fea3166402dd31de7c6b4a6924ca160212dd8a158b5265d61ea25987a96ea39; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 16 accumulators.
//   Its epilogue takes 32 columns at a time, to save registers.
// Shared memory: 221344 bytes; the launch asks for 222208 of 232448
//   a, b         10 stages * (4096 + 16384) = 204800
//   staging      2 consumers * 2 buffers * 4096 = 16384
//   full, empty  10 stages * 2 * 8 = 160
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  2 arrivals: 2 consumers
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
using ElementD = cutlass::half_t; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 32, kTileN = 128, kTileK = 64;
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
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cute::TmaDescriptor d_map;  // D, in staging boxes
  cutlass::half_t* activation_gradient_0;  // dy[m][pitch]
  cutlass::half_t* activation_gradient_1;  // dy[m][pitch]
  float* column_sum_2;  // sums[n]
  float* column_sum_2_partial;  // partial[groups of rows][n]
  int64_t activation_gradient_0_pitch;  // elements between rows of dy
  int64_t activation_gradient_1_pitch;  // elements between rows of dy
  int64_t column_sum_2_groups;  // partial sums of one sum
  int64_t column_sum_2_partial_batch;  // elements between the partial sums of batches
  int64_t activation_gradient_0_batch;  // elements between batches of activation_gradient_0
  int64_t activation_gradient_1_batch;  // elements between batches of activation_gradient_1
  int64_t column_sum_2_batch;  // elements between batches of column_sum_2
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t batches;  // of D
  int32_t a_batches;  // of A
  int32_t a_repeat;  // batches of D in a row that one of A serves
  int32_t b_batches;  // of B
  int32_t b_repeat;  // batches of D in a row that one of B serves
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, activation_gradient_0) == 512 && OFFSET(Parameters, activation_gradient_1) == 520);
static_assert(OFFSET(Parameters, column_sum_2) == 528 && OFFSET(Parameters, column_sum_2_partial) == 536);
static_assert(OFFSET(Parameters, activation_gradient_0_pitch) == 544 && OFFSET(Parameters, activation_gradient_1_pitch) == 552);
static_assert(OFFSET(Parameters, column_sum_2_groups) == 560 && OFFSET(Parameters, column_sum_2_partial_batch) == 568);
static_assert(OFFSET(Parameters, activation_gradient_0_batch) == 576 && OFFSET(Parameters, activation_gradient_1_batch) == 584);
static_assert(OFFSET(Parameters, column_sum_2_batch) == 592 && OFFSET(Parameters, a_tail_rows) == 600);
static_assert(OFFSET(Parameters, m) == 604 && OFFSET(Parameters, n) == 608);
static_assert(OFFSET(Parameters, k) == 612 && OFFSET(Parameters, batches) == 616);
static_assert(OFFSET(Parameters, a_batches) == 620 && OFFSET(Parameters, a_repeat) == 624);
static_assert(OFFSET(Parameters, b_batches) == 628 && OFFSET(Parameters, b_repeat) == 632);

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
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
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
                                              int m, int k, int batch) {
    cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally,
        tile, k, m, batch);
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

// Of max(x, 0): 0 at 0, NaN stays NaN.
struct ReluGradient {
  __device__ __forceinline__ static float slope(float x) { return x > 0.f ? 1.f : x <= 0.f ? 0.f : x; }
};

// Multiplies dy by a function's derivative (_activation/) at what passes here.
template <class Function, class Element> struct ActivationGradient {
  const Element* dy;
  int64_t pitch;
  struct Operand {
    Columns<Element> row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int n) const {
    // A row that does not exist has no columns.
    return {Columns<Element>(dy + at.row[0] * pitch, at.column, at.row[0] < m ? n : 0),
            Columns<Element>(dy + at.row[1] * pitch, at.column, at.row[1] < m ? n : 0)};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = operand.row[i / 2][i % 2] * Function::slope(x[i / 2][i % 2]);
  }
};

// Phi(x) + x phi(x), the derivative of x Phi(x): Phi, the normal distribution function, by the rational
// approximation of erfc in Abramowitz and Stegun 7.1.26 (|error| < 1.5e-7). Exactly 0 and 1 far from 0.
struct GeluGradient {
  __device__ __forceinline__ static float slope(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * x * x));  // exp(-x^2 / 2)
    float tail = fmaf(t, 0.530702714f, -0.726576013f);  // half of erfc's coefficients
    tail = fmaf(t, fmaf(t, fmaf(t, tail, 0.710706870f), -0.142248368f), 0.127414796f) * t * power;
    const float limit = x < 0.f ? tail : 1.f - tail;
    return power == 0.f ? limit : fmaf(0.398942280f * x, power, limit);  // x may be infinite there
  }
};

// Sums of what passes here over the rows of a fragment that a warp has, stored in `partial` [groups of
// rows][n]; a launch of its own adds the groups up (column_totals.cuh.jinja).
struct ColumnSum {
  float* partial;
  static constexpr int kRows = 8;  // of D, of one group
  // Lanes from kFirst to kLast apart have other rows of the same columns.
  static constexpr int kFirst = 1, kLast = 2;

  // What lies outside of D [m, n] does not count.
  __device__ __forceinline__ void apply(const float (&x)[2][2], const Coordinates& at, int m, int n) const {
    const bool second = threadIdx.x & kFirst;  // of the columns: half of the lanes go on with each
    const int column = second ? at.column[1] : at.column[0];
    int row[2] = {at.row[0], at.row[1]};
    // Else comparisons and addresses are kept for the next 64 rows, and spill.
    asm volatile("" : "+r"(row[0]), "+r"(row[1]));
    float sum[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) sum[j] = (row[0] < m ? x[0][j] : 0.f) + (row[1] < m ? x[1][j] : 0.f);
    float total = second ? sum[1] : sum[0];
    total += __shfl_xor_sync(~0u, second ? sum[0] : sum[1], kFirst);
    CUTE_UNROLL
    for (int lanes = 2 * kFirst; lanes <= kLast; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
    const int group = row[0] / kRows;
    const bool last = (threadIdx.x & (2 * kLast - 2 * kFirst)) == 0;
    if (last && group * kRows < m && column < n) partial[int64_t(group) * n + column] = total;
  }
};

// The steps from accumulators to D, in order.
// Operands of a chunk are loaded a chunk ahead, so that the main loop or the chunk before hides their latency.
struct Epilogue {
  struct Operands {
    ActivationGradient<ReluGradient, cutlass::half_t>::Operand step_0;
    ActivationGradient<GeluGradient, cutlass::half_t>::Operand step_1;
  };
  int m, n;  // past the last row and column
  ActivationGradient<ReluGradient, cutlass::half_t> step_0;
  ActivationGradient<GeluGradient, cutlass::half_t> step_1;
  ColumnSum step_2;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p, int batch)
      : m(p.m),
        n(p.n),
        step_0{p.activation_gradient_0 + batch * p.activation_gradient_0_batch, p.activation_gradient_0_pitch},
        step_1{p.activation_gradient_1 + batch * p.activation_gradient_1_batch, p.activation_gradient_1_pitch},
        step_2{p.column_sum_2_partial + batch * p.column_sum_2_partial_batch} {}

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_0.load(at, m, n),
        step_1.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Operands& operands, const Coordinates& at) {
    step_0.apply(x, operands.step_0);
    step_1.apply(x, operands.step_1);
    step_2.apply(x, at, m, n);
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Converts two adjacent values of a row to D's type, rounded to nearest even.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x[1]), "f"(x[0]));
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
      cute::SM90_TMA_STORE_3D::copy(&p.d_map, buffer, column, row, at.batch);
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
  alignas(1024) uint8_t staging[16384];
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 222208);

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    // An operand may have fewer batches than D: one serves `repeat` of them in a row, then the next.
    const int batch_a = at.batch / p.a_repeat % p.a_batches;
    const int batch_b = at.batch / p.b_repeat % p.b_batches;
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK, batch_a);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, batch_b);
      position.advance();
    }
  }
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
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
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = matrix(shared.b[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.a[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  Epilogue::Operands operands[kFragments];
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, rank);
    at.n += part * kBlocks * kWgmmaM;
    Epilogue epilogue(p, at.batch);
    Mainloop mainloop;
    int previous = position.stage;  // the stage that wgmma may still read
    shared.full[position.stage].wait(position.phase);
    mainloop.issue(rows + position.stage * kStageRows, columns + position.stage * kStageColumns, false);
    position.advance();
    CUTE_NO_UNROLL
    for (int k_tile = 1; k_tile < k_tiles; ++k_tile) {
      shared.full[position.stage].wait(position.phase);
      mainloop.next(rows + position.stage * kStageRows, columns + position.stage * kStageColumns,
                    shared.empty[previous]);
      previous = position.stage;
      position.advance();
    }
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    mainloop.finish(shared.empty[previous]);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i % 2][i / 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f], operands[f], coordinates(at, chunk, f));
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_fp16_batched_relu_gradient_fp16_gelu_gradient_fp16_column_sum_32x128x64_stages10_swap_5fea3166(const __grid_constant__ Parameters p) {
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

// ---- Column sums of step 2: a CTA adds up 32 columns of partial sums, in a fixed order ----
extern "C" __global__ void __launch_bounds__(1024)
    gemm_sm90a_fp16_batched_relu_gradient_fp16_gelu_gradient_fp16_column_sum_32x128x64_stages10_swap_5fea3166_column_sum_2(const __grid_constant__ Parameters p) {
  constexpr int kColumns = 32, kParts = 32;  // warps, each with every kParts-th group of rows
  __shared__ float sums[kParts][kColumns];
  wait_for_previous_grid();
  const int blocks = (p.n - 1) / kColumns + 1, lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t vector = blockIdx.x / blocks;  // which vector of [.., n]
  const int column = blockIdx.x % blocks * kColumns + lane;
  const float* partial = p.column_sum_2_partial + vector * p.column_sum_2_groups * p.n + column;
  float sum = 0.f;
  if (column < p.n)
    for (int64_t group = part; group < p.column_sum_2_groups; group += kParts) sum += partial[group * p.n];
  sums[part][lane] = sum;
  __syncthreads();
  if (part > 0 || column >= p.n) return;
  for (int i = 1; i < kParts; ++i) sum += sums[i][lane];
  p.column_sum_2[vector * p.column_sum_2_batch + column] = sum;
}
