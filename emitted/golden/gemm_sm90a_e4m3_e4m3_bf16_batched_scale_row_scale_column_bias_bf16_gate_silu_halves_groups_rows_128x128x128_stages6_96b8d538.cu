// gemm_sm90a_e4m3_e4m3_bf16_batched_scale_row_scale_column_bias_bf16_gate_silu_halves_groups_rows_128x128x128_stages6_96b8d538
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_row, scale_column, bias_bf16, gate_silu_halves
//   A e4m3 row, B e4m3 col, accumulated in fp32, D bf16 row
//   rows of A and D in groups that end at offsets in device memory, and a B for each
//   tile 128x128x128, cluster 1x1, 2 consumers, 6 stages, along_m, swizzle 8, store tma
// Digest 96b8d5385348a63f4b127c1c78f7e237e5bc0bda12c0dd56da05b29a047ef775; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 64 accumulators.
//   Its epilogue takes 64 columns at a time, to save registers.
// Shared memory: 221288 bytes; the launch asks for 222208 of 232448
//   a, b         6 stages * (16384 + 16384) = 196608
//   staging      2 consumers * 2 buffers * 4096 = 16384
//   groups       2050 integers * 4 = 8200
//   full, empty  6 stages * 2 * 8 = 96
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
using ElementD = cutlass::bfloat16_t; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 128, kTileN = 128, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 2;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 6;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 128, kColumns = 128;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 64;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 16;  // 2 x 2 fragments of D of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cute::TmaDescriptor d_map;  // D, in staging boxes
  float* scale_0;  // scale[m]
  float* scale_1;  // scale[n]
  cutlass::bfloat16_t* bias_2;  // bias[n]
  const int* offsets;  // where each group of rows ends
  int64_t scale_0_batch;  // elements between groups of scale_0
  int64_t scale_1_batch;  // elements between groups of scale_1
  int64_t bias_2_batch;  // elements between groups of bias_2
  int32_t m;  // rows of D
  int32_t n;  // columns of gate and up, twice those of D
  int32_t k;  // columns of A, rows of B
  int32_t batches;  // groups
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, b_map) == 128);
static_assert(OFFSET(Parameters, d_map) == 256 && OFFSET(Parameters, scale_0) == 384);
static_assert(OFFSET(Parameters, scale_1) == 392 && OFFSET(Parameters, bias_2) == 400);
static_assert(OFFSET(Parameters, offsets) == 408 && OFFSET(Parameters, scale_0_batch) == 416);
static_assert(OFFSET(Parameters, scale_1_batch) == 424 && OFFSET(Parameters, bias_2_batch) == 432);
static_assert(OFFSET(Parameters, m) == 440 && OFFSET(Parameters, n) == 444);
static_assert(OFFSET(Parameters, k) == 448 && OFFSET(Parameters, batches) == 452);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 128] += A[64 x 32] * B[32 x 128]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[64], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally, tile, k, m);
  }
};

// B is K-major: a row of 128 bytes has the k tile of one n. 8 rows of the gate, then the 8 of up
// that they are multiplied with: dimensions of the map, between which no row of memory moves.
struct OperandB {
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next

  // Starts the load of the tile at (n, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k, int batch) {
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally,
        tile, k, 0, 0, n / 16, batch);
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
    // Tiles are taken in bands of kSwizzle rows, each column by column, so that the operands of tiles in flight
    // stay in L2. In a band of 2 rows the order is 0 2 4 over 1 3 5.
    const int band = index / (kSwizzle * columns);
    const int width = min(rows - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * columns;
    const int row = band * kSwizzle + offset % width, column = offset / width;
    return {table.ends[group] + (row * kClusterM + rank % kClusterM) * kTileM,
            (column * kClusterN + rank / kClusterM) * kTileN, group, table.ends[group + 1]};
  }
};

// The rows and columns of D that a thread's fragment of 2 x 2 accumulators has. Epilogue and store see
// accumulators by these alone, never by wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

// 8 columns of wgmma are of the gate and the next 8 of up, for the same 8 columns of D: a thread has both of
// what it multiplies. Places in a tile count both; coordinates in D do not.

// Coordinates of fragment f of a chunk of the consumer's part of the tile, which starts at `at`: the MMA gives
// lane l the rows l / 4 and l / 4 + 8 of its warp's 16, and the columns 2 (l % 4) and 2 (l % 4) + 1 of every 8.
__device__ __forceinline__ Coordinates coordinates(const TileCoord& at, int chunk, int f) {
  const int lane = threadIdx.x % 32;
  const int row = at.m + chunk / kChunks * kWgmmaM + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = (at.n + chunk % kChunks * kChunkColumns) / 2 + f * 8 + lane % 4 * 2;
  return { {row, row + 8}, {column, column + 1} };
}

// The columns of the product, of n, that a fragment of D is made of: of the gate (factor 0) or of up (1).
// Past the end where D is.
__device__ __forceinline__ Coordinates product_columns(const Coordinates& at, int n, int factor) {
  const int column = at.column[0] < n / 2 ? at.column[0] + factor * (n / 2) : n;
  return { {at.row[0], at.row[1]}, {column, column + 1} };
}

// A fragment's two columns of a row of C or of a vector, loaded as one word; 0 past the last column. n is even
// here, and rows start at even elements. The word is split where it is used: split at the load, each load
// would be waited for before the next is issued.
template <class Element> struct Columns {
  using Word = cute::conditional_t<sizeof(Element) == 2, uint32_t, uint64_t>;
  Word word;

  Columns() = default;
  __device__ __forceinline__ Columns(const Element* row, const int (&column)[2], int n)
      : word(column[0] < n ? *reinterpret_cast<const Word*>(row + column[0]) : 0) {}

  __device__ __forceinline__ float operator[](int j) const {
    const Word bits = word >> (j * 8 * sizeof(Element));
    return float(reinterpret_cast<const Element&>(bits));
  }
};

// Multiplies each row of D by its entry of a vector.
struct ScaleRow {
  const float* scale;
  struct Operand {
    float row[2];
  };

  __device__ __forceinline__ Operand load(const Coordinates& at, int m, int) const {
    return {at.row[0] < m ? scale[at.row[0]] : 0.f, at.row[1] < m ? scale[at.row[1]] : 0.f};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= operand.row[i / 2];
  }
};

// Multiplies each column of D by its entry of a vector.
struct ScaleColumn {
  const float* scale;
  using Operand = Columns<float>;

  __device__ __forceinline__ Operand load(const Coordinates& at, int, int n) const {
    return {scale, at.column, n};
  }

  __device__ __forceinline__ void apply(float (&x)[2][2], const Operand& operand) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= operand[i % 2];
  }
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

// 1 / (1 + 2^-x) by the two fast units; exact limits at both infinities, NaN stays NaN.
__device__ __forceinline__ float logistic2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

// x / (1 + exp(-x)).
struct Silu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) { return x * logistic2(1.44269504f * x); }
};

// The factor of up itself.
struct Up {
  __device__ __forceinline__ static float function(float x) { return x; }
};

// Multiplies a function of the gate by up, which a thread has for the same columns of D.
template <class Function, class Factor> struct Gate {
  __device__ __forceinline__ void apply(const float (&of_product)[2][2][2], float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      x[i / 2][i % 2] =
          Function::function(of_product[0][i / 2][i % 2]) * Factor::function(of_product[1][i / 2][i % 2]);
  }
};

// The steps from accumulators to D, in order. Operands of a block of 64 rows are loaded once a tile.
// Operands of a chunk are loaded a chunk ahead, so that the main loop or the chunk before hides their latency.
struct Epilogue {
  struct Block {
    ScaleRow::Operand step_0;
  };
  struct Operands {
    ScaleColumn::Operand step_1[2];
    Bias<cutlass::bfloat16_t>::Operand step_2[2];
  };
  int m, n;  // past the last row and column of the group
  ScaleRow step_0;
  ScaleColumn step_1;
  Bias<cutlass::bfloat16_t> step_2;
  Gate<Silu, Up> step_3;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p, int batch, int m_end)
      : m(m_end),
        n(p.n),
        step_0{p.scale_0 + batch * p.scale_0_batch},
        step_1{p.scale_1 + batch * p.scale_1_batch},
        step_2{p.bias_2 + batch * p.bias_2_batch},
        step_3{} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {
        step_0.load(at, m, n / 2)};
  }

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        {step_1.load(product_columns(at, n, 0), m, n), step_1.load(product_columns(at, n, 1), m, n)},
        {step_2.load(product_columns(at, n, 0), m, n), step_2.load(product_columns(at, n, 1), m, n)}};
  }

  __device__ __forceinline__ void apply(Value (&of_product)[2][2][2], Value (&x)[2][2],
                                        const Block& block, const Operands& operands) {
    step_0.apply(of_product[0], block.step_0);
    step_0.apply(of_product[1], block.step_0);
    step_1.apply(of_product[0], operands.step_1[0]);
    step_1.apply(of_product[1], operands.step_1[1]);
    step_2.apply(of_product[0], operands.step_2[0]);
    step_2.apply(of_product[1], operands.step_2[1]);
    step_3.apply(of_product, x);
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
  static constexpr int kSpan = 64;  // bytes of a staging row
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
      // The group may end in the midst of the buffer: TMA stores its rows up to that.
      const int row = at.m + chunk / kChunks * kWgmmaM, column = (at.n + chunk % kChunks * kChunkColumns) / 2;
      const int rows = max(0, min(64, at.m_end - row));
      cute::SM90_TMA_STORE_4D::copy(&p.d_map, buffer, column, kRowsEnd - rows, row + rows, int(kRowsEnd));
      cute::tma_store_arrive();
    }
  }

  // stmatrix writes 16 x 16 elements of 16 bits; lanes 0-15 address the left 8 columns, 16-31 the right.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; f += 2) {
      const uint32_t address = cute::cast_smem_ptr_to_uint(buffer) + swizzled(row, f * 16 + lane / 16 * 16);
      const Pair pairs[4] = {converted(x[f][0]), converted(x[f][1]), converted(x[f + 1][0]),
                             converted(x[f + 1][1])};
      const auto& words = reinterpret_cast<const uint32_t(&)[4]>(pairs);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(address),
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
  GroupTable groups;
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 222208);

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(OperandA::kBytes + OperandB::kBytes);
      OperandA::load(p.a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, at.batch);
      position.advance();
    }
  }
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
using RowOperand = OperandA; using ColumnOperand = OperandB;
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
  const GroupedTiles tiles(p, shared.groups);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, rank);
    at.m += part * kBlocks * kWgmmaM;
    Epilogue epilogue(p, at.batch, at.m_end);
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
    for (int i = 0; i < kBlocks; ++i) block[i] = epilogue.load_block(coordinates(at, i * kChunks, 0));
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    mainloop.finish(shared.empty[previous]);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        Value of_product[2][2][2];  // of the gate, and of up
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 8 + i;
          of_product[i / 4][i / 2 % 2][i % 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
        epilogue.apply(of_product, x[f], block[chunk / kChunks], operands[f]);
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e4m3_bf16_batched_scale_row_scale_column_bias_bf16_gate_silu_halves_groups_rows_128x128x128_stages6_96b8d538(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(kSharing * kClusterSize);
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
    if (threadIdx.x == 0) produce(p, shared, rank, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}
