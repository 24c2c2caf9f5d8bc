// gemm_sm90a_int8_int8_bf16_scale_row_scale_column_64x256x128_consumers1_stages5_split8_stream_k_43e16d8e
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_row, scale_column
//   A int8 row, B int8 col, accumulated in int32, D bf16 row
//   tile 64x256x128, cluster 1x1, 1 consumer, k split over 8 CTAs, 5 stages, along_m, swizzle 8, store tma
//   stream-K: clusters split the k of the tiles that do not fill a wave, and of one wave before these
// Digest 43e16d8ef8ab1f3341d30dce7da50c9a8a475c05d1f21cf91b130b6c32674d42; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroup 1, the consumer: wgmma on 64 rows of the CTA's tile, then the epilogue.
// Registers per thread: at most 255, without setmaxnreg.
//   A consumer thread has 128 accumulators.
//   Its epilogue takes 32 columns at a time, to save registers.
// Shared memory: 213072 bytes; the launch asks for 214016 of 232448
//   a, b         5 stages * (8192 + 32768) = 204800
//   staging      1 consumer * 2 buffers * 4096 = 8192
//   full, empty  5 stages * 2 * 8 = 80
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  1 arrivals: 1 consumer
// named 1     all that arrive  its staging buffers           128 threads of a consumer
// named 5     all that arrive  stages, reused below          128 threads of consumers
// cluster     all that arrive  accumulators kept in stages   all threads of 8 CTAs
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
using ElementD = cutlass::bfloat16_t; using Accumulator = int32_t;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 64, kTileN = 256, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 8, kClusterSize = kSplit;  // CTAs of a cluster that split a tile's k
constexpr int kConsumers = 1;  // consumer warpgroups
constexpr int kSharing = 1;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 5;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 64, kColumns = 256;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kFinished = kColumns / kSplit;  // columns of the tile that one CTA stores
constexpr int kChunkColumns = 32;  // columns of a block in one pass of the epilogue
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
  float* scale_0;  // scale[m]
  float* scale_1;  // scale[n]
  int32_t* parts;  // sums of parts of tiles, by blocks
  int* raised;  // a flag for each warp of each block that leaves a part
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  int32_t cut;  // tiles that are cut: the first
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, scale_0) == 512 && OFFSET(Parameters, scale_1) == 520);
static_assert(OFFSET(Parameters, parts) == 528 && OFFSET(Parameters, raised) == 536);
static_assert(OFFSET(Parameters, a_tail_rows) == 544 && OFFSET(Parameters, m) == 548);
static_assert(OFFSET(Parameters, n) == 552 && OFFSET(Parameters, k) == 556);
static_assert(OFFSET(Parameters, cut) == 560);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 256] += A[64 x 32] * B[32 x 256]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, int32_t (&d)[128], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, add;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
          "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63]),
          "+r"(d[64]), "+r"(d[65]), "+r"(d[66]), "+r"(d[67]), "+r"(d[68]), "+r"(d[69]), "+r"(d[70]), "+r"(d[71]), "+r"(d[72]), "+r"(d[73]), "+r"(d[74]), "+r"(d[75]), "+r"(d[76]), "+r"(d[77]), "+r"(d[78]), "+r"(d[79]), "+r"(d[80]), "+r"(d[81]), "+r"(d[82]), "+r"(d[83]), "+r"(d[84]), "+r"(d[85]), "+r"(d[86]), "+r"(d[87]), "+r"(d[88]), "+r"(d[89]), "+r"(d[90]), "+r"(d[91]), "+r"(d[92]), "+r"(d[93]), "+r"(d[94]), "+r"(d[95]),
          "+r"(d[96]), "+r"(d[97]), "+r"(d[98]), "+r"(d[99]), "+r"(d[100]), "+r"(d[101]), "+r"(d[102]), "+r"(d[103]), "+r"(d[104]), "+r"(d[105]), "+r"(d[106]), "+r"(d[107]), "+r"(d[108]), "+r"(d[109]), "+r"(d[110]), "+r"(d[111]), "+r"(d[112]), "+r"(d[113]), "+r"(d[114]), "+r"(d[115]), "+r"(d[116]), "+r"(d[117]), "+r"(d[118]), "+r"(d[119]), "+r"(d[120]), "+r"(d[121]), "+r"(d[122]), "+r"(d[123]), "+r"(d[124]), "+r"(d[125]), "+r"(d[126]), "+r"(d[127])
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
  static constexpr int kBytes = 32768;  // of one stage
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
__device__ __forceinline__ Coordinates coordinates(const TileCoord& at, int chunk, int f) {
  const int lane = threadIdx.x % 32;
  const int row = at.m + chunk / kChunks * kWgmmaM + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = at.n + chunk % kChunks * kChunkColumns + f * 8 + lane % 4 * 2;
  return { {row, row + 8}, {column, column + 1} };
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

// The steps from accumulators to D, in order. Operands of a block of 64 rows are loaded once a tile.
// Operands of a chunk are loaded a chunk ahead, so that the main loop or the chunk before hides their latency.
struct Epilogue {
  struct Block {
    ScaleRow::Operand step_0;
  };
  struct Operands {
    ScaleColumn::Operand step_1;
  };
  int m, n;  // past the last row and column
  ScaleRow step_0;
  ScaleColumn step_1;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.scale_0},
        step_1{p.scale_1} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {
        step_0.load(at, m, n)};
  }

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_1.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block, const Operands& operands) {
    step_0.apply(x, block.step_0);
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
      const int column = at.n + chunk % kChunks * kChunkColumns, row = at.m + chunk / kChunks * kWgmmaM;
      cute::SM90_TMA_STORE_2D::copy(&p.d_map, buffer, column, row);
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
  alignas(1024) uint8_t staging[8192];
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 214016);

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
                 "ld.shared::cluster.v4.b32 { %0, %1, %2, %3 }, [there];\n}"
                 : "=r"(found.value[0]), "=r"(found.value[1]), "=r"(found.value[2]), "=r"(found.value[3])
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

// Partial sums of tiles whose k clusters split (stream-K). A cluster without a tile's last k tile writes its
// accumulators to memory, in its own slot: it has at most one such tile. The cluster with the last k tile adds
// them to its own, in the order of k. A warp waits only for the same warp of those clusters.
struct Parts {
  static constexpr int kOfRows = kFinished / 8, kOfBlock = kBlocks * kOfRows;
  static constexpr int kThreads = kConsumers * 128;
  static constexpr int kInFlight = 8;  // fragments that a thread has in flight
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
    asm volatile("ld.global.cg.v4.b32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(found.value[0]), "=r"(found.value[1]), "=r"(found.value[2]), "=r"(found.value[3])
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

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int first = rank * k_tiles;  // past the end of k, TMA fills stages with zeros
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    const TileCoord at = tiles.at(unit.tile, 0);
    const int loaded = threadIdx.x == 0 ? unit.end : unit.begin;  // the other threads only meet the cluster
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = unit.begin; k_tile < loaded; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
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

// A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
__device__ __forceinline__ void fence(Accumulator (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(accumulators[i])::"memory");
}

// Arrives at the empty barrier of a stage that this consumer has read.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  if (threadIdx.x % 128 == 0) empty.arrive();
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
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int part = consumer;
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  Store store(shared.staging, consumer);
  Epilogue epilogue(p);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  const Parts parts(p, rank, consumer);
  for (Unit unit; walk.next(unit);) {
    TileCoord at = tiles.at(unit.tile, 0);
    at.m += part * kBlocks * kWgmmaM;
    at.n += rank * kFinished;
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
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) block[i] = epilogue.load_block(coordinates(at, i * kChunks, 0));
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    mainloop.finish(shared.empty[previous]);
    SplitSums total(shared.a, mainloop.accumulators, part, rank);
    if (unit.end < k_tiles) {
      parts.leave(total.accumulators, cluster);
      total.finish();
      continue;
    }
    if (unit.begin > 0) parts.add(total.accumulators, walk.first(unit.tile), cluster);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i / 2][i % 2] = Value(total.accumulators[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f], block[chunk / kChunks], operands[f]);
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
    total.finish();
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_int8_int8_bf16_scale_row_scale_column_64x256x128_consumers1_stages5_split8_stream_k_43e16d8e(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.a_tail_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(kSharing);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
  if (warpgroup == 0) {
    produce(p, shared, rank, cluster, clusters);
  } else {
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}
