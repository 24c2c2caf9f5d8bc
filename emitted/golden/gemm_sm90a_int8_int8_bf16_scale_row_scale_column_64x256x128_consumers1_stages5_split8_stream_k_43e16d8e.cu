// gemm_sm90a_int8_int8_bf16_scale_row_scale_column_64x256x128_consumers1_stages5_split8_stream_k_43e16d8e
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_row, scale_column
//   A int8 row, B int8 col, accumulated in int32, D bf16 row
//   tile 64x256x128, cluster 1x1, 1 consumer, k split over 8 blocks, 5 stages, along_m, group 8, store tma
//   stream-K: clusters share the k of tiles that do not fill a wave
// Digest 43e16d8ef8ab1f3341d30dce7da50c9a8a475c05d1f21cf91b130b6c32674d42; `warploom show` prints this file.
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
constexpr int kSplit = 8;  // blocks that share a tile's k: a cluster
constexpr int kClusterSize = kSplit;
constexpr int kConsumers = 1;  // warpgroups, beside one producer warpgroup
constexpr int kSharing = 1;    // consumers that share a tile, each with some of its rows
constexpr int kStages = 5;
constexpr int kGroup = 8;
constexpr int kRows = 64, kColumns = 256;  // of wgmma in a tile
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // of 64 rows, a consumer's
constexpr int kCount = kColumns / 2;  // accumulators of a thread in 64 rows of wgmma
constexpr int kFinished = kColumns / kSplit;  // columns of the tile that one block finishes
constexpr int kChunkColumns = 32;  // a block is finished by chunks
constexpr int kChunks = kFinished / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Packed by the host: these assertions are what keeps the two sides together.
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
  int32_t k;  // products summed
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

// ---- Parts ----------------------------------------------------------------------------------
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

// A matrix in shared memory as wgmma is told of it: rows come in groups of 8, `stride` bytes from one
// group to the next, swizzled by `layout`; `leading` bytes from one box of columns to the next. Adding
// to the result moves the start, in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix(const uint8_t* start, int leading, int stride, int layout) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(start) >> 4;
  descriptor.bitfield.leading_byte_offset_ = leading >> 4;
  descriptor.bitfield.stride_byte_offset_ = stride >> 4;
  descriptor.bitfield.layout_type_ = layout;
  return descriptor;
}

// A is K-major: a row of 128 bytes is tile k of one m.
struct OperandA {
  using Load = cute::SM90_TMA_LOAD_2D;
  static constexpr int kBytes = 8192;  // of one stage
  static constexpr int kStep = 32 / 16;  // from one instruction's k to the next, in a descriptor

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    auto* barrier = reinterpret_cast<uint64_t*>(&full);
    Load::copy(&map, barrier, kEvictNormally, tile, k, m);
  }
};

// B is K-major: a row of 128 bytes is tile k of one n.
struct OperandB {
  using Load = cute::SM90_TMA_LOAD_2D;
  static constexpr int kBytes = 32768;  // of one stage
  static constexpr int kStep = 32 / 16;  // from one instruction's k to the next, in a descriptor

  // Starts the load of the tile at (n, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k) {
    auto* barrier = reinterpret_cast<uint64_t*>(&full);
    Load::copy(&map, barrier, kEvictNormally, tile, k, n);
  }
};

// A position in a ring of buffers. The phase is the parity that the next wait looks for: it flips
// each time the ring wraps, so a barrier needs no reset.
template <int kCount> struct Ring {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};
using Position = Ring<kStages>;

// The consumers share each tile: there are no turns to take.
struct Order {
  __device__ __forceinline__ Order(int, int, Position&) {}
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void multiplied(int, int) const {}
  __device__ __forceinline__ void pass(Position&) const {}
  __device__ __forceinline__ void finish(int) const {}
};

// Where a tile of D starts.
struct Place {
  int m, n;
};

// The tiles of D in the order in which clusters take them: bands of kGroup tiles along_m, so that
// the operands of tiles in flight stay in L2. Counted in clusters; a block adds its place in its own.
struct Tiles {
  int along, across;  // extents in clusters

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : along((p.m + kTileM * kClusterM - 1) / (kTileM * kClusterM)),
        across((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)) {}
  __device__ __forceinline__ int count() const { return along * across; }

  // Where this block's tile starts.
  __device__ __forceinline__ Place at(int index, int rank) const {
    const int band = index / (kGroup * across);
    const int height = min(along - band * kGroup, kGroup);
    const int offset = index - band * kGroup * across;
    const int i = band * kGroup + offset % height, j = offset / height;
    return {(i * kClusterM + rank % kClusterM) * kTileM,
            (j * kClusterN + rank / kClusterM) * kTileN};
  }
};

// What a cluster computes at a time: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The units of a cluster. The k tiles of the first p.cut tiles, one tile's after the other's, are cut into as
// many ranges as there are clusters, equal but for one k tile; where clusters are a multiple of those tiles,
// all of these are cut at the same k. A cluster walks its own from the last tile to the first: its part of a
// tile that another finishes comes before what it finishes itself, so that each waits for clusters before it
// only, which began before it. Then it takes whole tiles, in turn with the others.
struct Walk {
  int k_tiles, tiles, clusters;
  int shared;     // k tiles of all ranges
  int low, high;  // of the range, what is left
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

  // The cluster whose range has the first k tile of a tile that is cut.
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

// A thread holds accumulators in fragments of two rows by two columns. Epilogue and store see a fragment
// only through its logical coordinates in D, never through wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

// The first m and n of a chunk of the consumer's part of the tile, which starts at `at`.
__device__ __forceinline__ int chunk_m(const Place& at, int chunk) {
  return at.m + chunk / kChunks * kWgmmaM;
}
__device__ __forceinline__ int chunk_n(const Place& at, int chunk) {
  return at.n + chunk % kChunks * kChunkColumns;
}

// Where fragment f of a chunk lies: wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, and
// columns 2 (l % 4) and the next of every 8.
__device__ __forceinline__ Coordinates coordinates(const Place& at, int chunk, int f) {
  const int lane = threadIdx.x % 32, row = chunk_m(at, chunk) + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = chunk_n(at, chunk) + f * 8 + lane % 4 * 2;
  return { {row, row + 8}, {column, column + 1} };
}

// A fragment's two columns of a row of C or of a vector, read as one word; 0 past the last column. n is
// even here and rows start at even elements. The word is taken apart only where it is used: taken apart
// at the load, every load would be waited for before the next is issued.
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

// The steps between accumulators and D, in order. What a step reads once for 64 rows of wgmma is loaded
// once a tile; what it reads of a fragment a chunk ahead, so that the latency hides under the products or
// the chunk before.
struct Epilogue {
  struct Block {
    ScaleRow::Operand step_0;
  };
  struct Operands {
    ScaleColumn::Operand step_1;
  };
  int m, n;
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

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block,
                                        const Operands& operands) {
    step_0.apply(x, block.step_0);
    step_1.apply(x, operands.step_1);
  }
};

// Two neighbours in a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two values of a row as D holds them, rounded to nearest even.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x[1]), "f"(x[0]));
  return reinterpret_cast<const Pair&>(bits);
}

// D leaves through two staging buffers per consumer: one is filled while TMA stores the other.
struct Store {
  static constexpr int kSpan = 64;  // bytes of a staging row
  static constexpr int kBytes = 64 * kSpan;
  uint8_t* buffers;
  int barrier, thread;  // named barrier and thread number in the warpgroup
  int first = 0;        // the buffer that the tile begins with

  __device__ __forceinline__ Store(uint8_t* staging, int consumer)
      : buffers(staging + consumer * 2 * kBytes), barrier(1 + consumer), thread(threadIdx.x % 128) {}

  // TMA's swizzle: the 16-byte column of a row is XORed with bits of the row number.
  __device__ __forceinline__ static int swizzled(int row, int byte) {
    const int offset = row * kSpan + byte;
    return offset ^ ((offset >> 3) & (kSpan - 16));
  }

  // Stores one chunk of the consumer's part of the tile, which starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const Place& at, int chunk) {
    uint8_t* buffer = buffers + (first ^ chunk % 2) * kBytes;
    if (chunk + 1 == kBlocks * kChunks) first ^= kBlocks * kChunks % 2;  // buffers alternate across tiles
    if (thread == 0) cute::tma_store_wait<1>();  // the store that last read this buffer is done
    cutlass::arch::NamedBarrier::sync(128, barrier);
    stage(buffer, x);
    cute::tma_store_fence();  // make the writes visible to TMA before the barrier releases its thread
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if (thread == 0) {
      cute::SM90_TMA_STORE_2D::copy(&p.d_map, buffer, chunk_n(at, chunk), chunk_m(at, chunk));
      cute::tma_store_arrive();
    }
  }

  // 16 rows by 16 columns of 16-bit elements at a time; lanes 0-15 address the left 8 columns.
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

  // Shared memory must outlive the stores that read it.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[8192];
  FullBarrier full[kStages];    // the producers' bytes have arrived
  EmptyBarrier empty[kStages];  // every consumer that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 214016);

// The sums of one tile's products over all of k, of which each block of the cluster has a part. A block
// leaves its sums in its own shared memory, where the stages were, and then adds up what all blocks have of
// the columns that it finishes, always in the same order.
struct SplitSums {
  struct alignas(16) Fragment { Accumulator value[4]; };  // a thread's share of 64 rows by 8 columns
  static constexpr int kFragmentsOfTile = kColumns / 8, kFragmentsFinished = kFinished / 8;
  static_assert(sizeof(Fragment[kSharing * kBlocks * kFragmentsOfTile * 128])
                <= kStages * (OperandA::kBytes + OperandB::kBytes));
  Accumulator sums[kBlocks][kFinished / 2];

  // All threads of the cluster arrive and wait, the producers' too. What they wrote before they arrive is
  // there for all that have waited.
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

  // Where the thread's share of a fragment lies, in every block alike.
  __device__ __forceinline__ static int place(int consumer, int block, int fragment) {
    return ((consumer * kBlocks + block) * kFragmentsOfTile + fragment) * 128 + threadIdx.x % 128;
  }

  // Reads what lies at `address` in the shared memory of the block with that rank. Volatile keeps it between
  // the barriers.
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
    cutlass::arch::NamedBarrier::sync(kConsumers * 128, 5);  // no product reads the stages any more
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
        Accumulator& sum = sums[block][fragment * 4 + j] = found[0].value[j];
        CUTE_UNROLL
        for (int other = 1; other < kSplit; ++other) sum += found[other].value[j];
      }
    }
    cute::tma_store_fence();  // TMA writes to the stages next: its writes come after these
    arrive();
  }

  // No block fills its stages again, or ends, before all have read from it.
  __device__ __forceinline__ void finish() const { wait(); }
};

// The sums of a tile that is cut. A cluster that does not have its last k tile leaves its part in memory, as
// its registers have it: each block in a place of its own, since it leaves one part at most. Who has the
// last k tile adds the parts to its own, in the order of k. A warp waits for what the same warps of those
// clusters leave, and for nothing else.
struct Parts {
  struct alignas(16) Fragment { Accumulator value[4]; };  // a thread's share of 64 rows by 8 columns
  static constexpr int kOfRows = kFinished / 8, kOfBlock = kBlocks * kOfRows;
  static constexpr int kThreads = kConsumers * 128;
  static constexpr int kInFlight = 8;  // fragments that a thread reads at a time
  static constexpr int kAtOnce = kOfBlock < kInFlight ? kInFlight / kOfBlock : 1;  // parts,
  static constexpr int kRead = kOfBlock < kInFlight ? kOfBlock : kInFlight;        // and of each of them
  using Sums = Accumulator[kBlocks][kOfRows * 4];
  Fragment* const parts;
  int* const raised;  // by a warp that has left its part, and lowered by the one that has it
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

  // Leaves the part of this block, which is of `cluster`.
  __device__ __forceinline__ void leave(const Sums& sums, int cluster) const {
    CUTE_UNROLL
    for (int i = 0; i < kOfBlock; ++i) {
      const Accumulator* const sum = sums[i / kOfRows] + i % kOfRows * 4;
      *place(cluster, i) = {sum[0], sum[1], sum[2], sum[3]};
    }
    __syncwarp();  // what all lanes have written is there for who sees the flag
    if (threadIdx.x % 32 == 0)
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag(cluster)) : "memory");
  }

  // From L2, where other multiprocessors have left it.
  __device__ __forceinline__ static Fragment read(const Fragment* from) {
    Fragment found;
    asm volatile("ld.global.cg.v4.b32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(found.value[0]), "=r"(found.value[1]), "=r"(found.value[2]), "=r"(found.value[3])
                 : "l"(from)
                 : "memory");
    return found;
  }

  // Adds the parts that the clusters from `first` to `last` leave of the tile that this one finishes.
  __device__ __forceinline__ void add(Sums& sums, int first, int last) const {
    for (int other = first + int(threadIdx.x % 32); other < last; other += 32) {
      int up;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(up) : "l"(flag(other)) : "memory");
      while (up == 0);
      *flag(other) = 0;  // as the next launch must find it
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
            Accumulator* const sum = sums[fragment / kOfRows] + fragment % kOfRows * 4;
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) sum[j] += found[i / kRead][i % kRead].value[j];
          }
        }
      }
    }
  }
};

// ---- Producer: one thread keeps the ring of stages full ----------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK * kSplit - 1) / (kTileK * kSplit);
  const int first = rank * k_tiles;  // past the end of k, TMA fills stages with zeros
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    const Place at = tiles.at(unit.tile, 0);
    const int loaded = threadIdx.x == 0 ? unit.end : unit.begin;  // the other threads only meet the cluster
    const bool tail = p.m - at.m < kTileM;  // rows past the end would take as long as any, for nothing
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = unit.begin; k_tile < loaded; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Expect first: the barrier then cannot complete before every byte, its peers' too, is here.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, (first + k_tile) * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, (first + k_tile) * kTileK);
      position.advance();
    }
    __syncwarp();
    SplitSums::meet();  // all sums lie where stages were
    SplitSums::meet();  // and were read: stages may be filled again
  }
}

// ---- Consumer: products of its rows of the tile, then their epilogue and store --------------------
using RowOperand = OperandA; using ColumnOperand = OperandB;
// Distances between what descriptors describe, which count 16 bytes: stages, and 64 rows.
constexpr int kStageRows = RowOperand::kBytes / 16, kStageColumns = ColumnOperand::kBytes / 16;
constexpr int kBlockRows = kStageRows * kWgmmaM / kRows;

// Keeps the compiler from moving the sums of a block across asynchronous products.
__device__ __forceinline__ void fence(Accumulator (&sums)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

// A stage is free once every consumer that reads it has let go of it.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  if (threadIdx.x % 128 == 0) empty.arrive();
}

// The sums of one tile's products, which the tensor core adds up itself.
struct Products {
  Accumulator sums[kBlocks][kCount];

  // Issues the products of one stage; they run on while the warpgroup goes on.
  __device__ __forceinline__ void issue(uint64_t rows, uint64_t columns, bool add) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(sums[block]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step) {
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        Wgmma::fma(rows + block * kBlockRows + step * RowOperand::kStep, columns + step * ColumnOperand::kStep,
                   sums[block], add || step > 0);
    }
    cute::warpgroup_commit_batch();
  }

  __device__ __forceinline__ void first(uint64_t rows, uint64_t columns) { issue(rows, columns, false); }

  // Adds the products of the next stage, and lets go of the stage before.
  __device__ __forceinline__ void next(uint64_t rows, uint64_t columns, EmptyBarrier& previous) {
    issue(rows, columns, true);
    cute::warpgroup_wait<1>();  // all but the products just issued are done: so is the stage before
    release(previous);
  }

  __device__ __forceinline__ void finish(EmptyBarrier& previous) {
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(sums[block]);
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
  const Order order(consumer, k_tiles, position);
  Store store(shared.staging, consumer);
  Epilogue epilogue(p);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  Walk walk(p, tiles.count(), k_tiles, cluster, clusters);
  const Parts parts(p, rank, consumer);
  for (Unit unit; walk.next(unit);) {
    Place at = tiles.at(unit.tile, 0);
    at.m += part * kBlocks * kWgmmaM;
    at.n += rank * kFinished;
    Products products;
    order.begin();
    int previous = position.stage;  // the stage whose products may still be running
    shared.full[position.stage].wait(position.phase);
    products.first(rows + position.stage * kStageRows, columns + position.stage * kStageColumns);
    order.multiplied(0, unit.k_tiles());
    position.advance();
    CUTE_NO_UNROLL
    for (int k_tile = 1; k_tile < unit.k_tiles(); ++k_tile) {
      shared.full[position.stage].wait(position.phase);
      products.next(rows + position.stage * kStageRows, columns + position.stage * kStageColumns,
                    shared.empty[previous]);
      order.multiplied(k_tile, unit.k_tiles());
      previous = position.stage;
      position.advance();
    }
    order.pass(position);
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) block[i] = epilogue.load_block(coordinates(at, i * kChunks, 0));
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    products.finish(shared.empty[previous]);
    SplitSums total(shared.a, products.sums, part, rank);
    if (unit.end < k_tiles) {
      parts.leave(total.sums, cluster);
      total.finish();
      continue;
    }
    if (unit.begin > 0) parts.add(total.sums, walk.first(unit.tile), cluster);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i / 2][i % 2] = Value(total.sums[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f], block[chunk / kChunks], operands[f]);
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
    total.finish();
  }
  order.finish((tiles.count() - cluster + clusters - 1) / clusters);
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_int8_int8_bf16_scale_row_scale_column_64x256x128_consumers1_stages5_split8_stream_k_43e16d8e(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that it is uniform
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
  cute::cluster_arrive_relaxed();  // no block signals another's barriers before they exist
  cute::cluster_wait();
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warpgroup == 0) {
    produce(p, shared, rank, cluster, clusters);
  } else {
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
}
