// gemm_sm90a_bf16_bf16_e4m3_bias_bf16_quantize_pow2_pingpong_128x128x64_cluster2x1_stages6_0008f9c3
//
// D[m, n] = epilogue(A[m, k] B[k, n]): bias_bf16, quantize_pow2
//   A bf16 row, B bf16 col, accumulated in fp32, D e4m3 row
//   tile 128x128x64, cluster 2x1, 2 consumers, 6 stages, along_m, group 8, store tma
// Digest 0008f9c37fc554ae08049cc313dc160e20a316ef6a29670dfb79e80b7b915b53; `warploom show` prints this file.
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
using ElementD = cutlass::float_e4m3_t; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 128, kTileN = 128, kTileK = 64;
constexpr int kClusterM = 2, kClusterN = 1;
constexpr int kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // warpgroups, beside one producer warpgroup
constexpr int kSharing = 1;    // consumers that share a tile, each with some of its rows
constexpr int kTurns = kConsumers / kSharing;  // tiles in work: one is finished under the other's products
constexpr int kStages = 6;
constexpr int kGroup = 8;
constexpr int kRows = 128, kColumns = 128;  // of wgmma in a tile
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // of 64 rows, a consumer's
constexpr int kCount = kColumns / 2;  // accumulators of a thread in 64 rows of wgmma
constexpr int kChunkColumns = 64;  // a block is finished by chunks
constexpr int kChunks = kColumns / kChunkColumns;
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
  cutlass::bfloat16_t* bias_0;  // bias[n]
  float* quantize_1;  // scales[n / 128][pitch]
  int64_t quantize_1_pitch;  // elements between blocks of a row
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // products summed
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, bias_0) == 512 && OFFSET(Parameters, quantize_1) == 520);
static_assert(OFFSET(Parameters, quantize_1_pitch) == 528 && OFFSET(Parameters, a_tail_rows) == 536);
static_assert(OFFSET(Parameters, m) == 540 && OFFSET(Parameters, n) == 544);
static_assert(OFFSET(Parameters, k) == 548);

// ---- Parts ----------------------------------------------------------------------------------
// D[64 x 128] += A[64 x 16] * B[16 x 128]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[64], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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
  static constexpr int kBytes = 16384;  // of one stage
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
  using Load = cute::SM90_TMA_LOAD_MULTICAST_2D;
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kRows = 128, kRowBytes = 128;  // of the tile
  static constexpr int kStep = 32 / 16;  // from one instruction's k to the next, in a descriptor
  static constexpr uint16_t kReceivers = (1 << kClusterSize) - 1;

  // Starts the load of the tile's rows from `first` on, as many as the map's box has, for the whole cluster.
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k, int first) {
    auto* barrier = reinterpret_cast<uint64_t*>(&full);
    Load::copy(&map, barrier, kReceivers, kEvictNormally, tile + first * kRowBytes,
               k, n + first);
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

// The two consumers take turns at the products. A barrier's parity tells one lap of the ring from the
// next but not from the one after: only once the other has waited for all of its stages may this
// consumer wait for its own. Named barrier 3 opens turn 0, 4 opens turn 1.
struct Order {
  int turn, k_tiles;

  __device__ __forceinline__ Order(int turn, int k_tiles, Position& position) : turn(turn), k_tiles(k_tiles) {
    if (turn == 1) pass(position);  // turn 0 begins
  }

  __device__ __forceinline__ void begin() const { cutlass::arch::NamedBarrier::sync(256, 3 + turn); }

  __device__ __forceinline__ void multiplied(int, int) const {}

  // Opens the other turn, and steps over the stages of its tile.
  __device__ __forceinline__ void pass(Position& position) const {
    cutlass::arch::NamedBarrier::arrive(256, 4 - turn);
    position.stage += k_tiles;
    position.phase ^= position.stage / kStages % 2;
    position.stage %= kStages;
  }

  // The last pass opened a turn that has no tile: it must not be left pending.
  __device__ __forceinline__ void finish(int tiles) const {
    if (tiles % 2 == turn) begin();
  }
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

// Divides blocks of 128 columns of a row by a scale each, which is stored: their largest magnitude / 448, or
// the next power of two. Blocks of zeros and with infinities have 1; NaN says nothing of a scale and stays NaN.
template <bool kPowerOfTwo> struct Quantize {
  float* scales;
  int64_t pitch;
  static constexpr int kColumns = 128;

  // The largest magnitudes of two rows, of what a thread has seen of them.
  struct Largest {
    float row[2] = {0.f, 0.f};
  };

  // What lies outside of D [m, n] does not count.
  __device__ __forceinline__ static void note(Largest& largest, const float (&x)[2][2],
                                              const Coordinates& at, int n) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (at.column[i % 2] < n) largest.row[i / 2] = fmaxf(largest.row[i / 2], fabsf(x[i / 2][i % 2]));
  }

  // What the rows of a block that starts at a thread's `at` are multiplied by; its scales are stored. The four
  // lanes of a row have two columns of every eight each.
  __device__ __forceinline__ Largest inverse(const Largest& largest, const Coordinates& at, int m,
                                             int n) const {
    Largest found;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float most = largest.row[i];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const bool usual = most > 0.f && most <= 3.40282347e38f;
      float inverse = usual ? fminf(__fdiv_rn(448.f, most), 3.40282347e38f) : 1.f;
      if (kPowerOfTwo) inverse = __int_as_float(__float_as_int(inverse) & 0x7f800000);
      if (threadIdx.x % 4 == 0 && at.row[i] < m && at.column[0] < n)
        scales[at.column[0] / kColumns * pitch + at.row[i]] = __fdiv_rn(1.f, inverse);
      found.row[i] = inverse;
    }
    return found;
  }

  __device__ __forceinline__ void finish() const {}
};

// The steps between accumulators and D, in order. What a step reads once for 64 rows of wgmma is loaded
// once a tile; what it reads of a fragment a chunk ahead, so that the latency hides under the products or
// the chunk before.
struct Epilogue {
  struct Block {
  };
  struct Operands {
    Bias<cutlass::bfloat16_t>::Operand step_0;
  };
  int m, n;
  Bias<cutlass::bfloat16_t> step_0;
  Quantize<true> step_1;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.bias_0},
        step_1{p.quantize_1, p.quantize_1_pitch} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {};
  }

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_0.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block,
                                        const Operands& operands, const Coordinates& at) {
    step_0.apply(x, operands.step_0);
  }

  __device__ __forceinline__ void finish() const {
    step_1.finish();
  }
};

// Two neighbours in a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two values of a row as D holds them: rounded to nearest even, finite overflow and infinities to the
// largest number, NaN kept.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(x[1]), "f"(x[0]));
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

  // Shared memory must outlive the stores that read it.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[16384];
  FullBarrier full[kStages];    // the producers' bytes have arrived
  EmptyBarrier empty[kStages];  // every consumer that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 214016);

// ---- Producer: one thread keeps the ring of stages full ----------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const Place at = tiles.at(tile, rank);
    const bool tail = p.m - at.m < kTileM;  // rows past the end would take as long as any, for nothing
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = !tail ? kTileM : at.m < p.m ? p.a_tail_rows : 0;  // a neighbour's are all past it
    const int b_first = rank * (OperandB::kRows / kClusterM);  // of the rows that this block loads
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Expect first: the barrier then cannot complete before every byte, its peers' too, is here.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      if (a_rows > 0) OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, b_first);
      position.advance();
    }
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
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// A stage is free once every block that its producer multicasts to has let go of it.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  const uint32_t block = threadIdx.x % 128;
  empty.arrive(block, block < kClusterSize);
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
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  const int part = consumer % kSharing, turn = consumer / kSharing;
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  const Order order(consumer, k_tiles, position);
  Store store(shared.staging, consumer);
  Epilogue epilogue(p);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  for (int tile = cluster + turn * clusters; tile < tiles.count(); tile += kTurns * clusters) {
    Place at = tiles.at(tile, rank);
    at.m += part * kBlocks * kWgmmaM;
    Products products;
    order.begin();
    int previous = position.stage;  // the stage whose products may still be running
    shared.full[position.stage].wait(position.phase);
    products.first(rows + position.stage * kStageRows, columns + position.stage * kStageColumns);
    order.multiplied(0, k_tiles);
    position.advance();
    CUTE_NO_UNROLL
    for (int k_tile = 1; k_tile < k_tiles; ++k_tile) {
      shared.full[position.stage].wait(position.phase);
      products.next(rows + position.stage * kStageRows, columns + position.stage * kStageColumns,
                    shared.empty[previous]);
      order.multiplied(k_tile, k_tiles);
      previous = position.stage;
      position.advance();
    }
    order.pass(position);
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) block[i] = epilogue.load_block(coordinates(at, i * kChunks, 0));
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    products.finish(shared.empty[previous]);
    // Values wait in the registers of their sums until all that share a scale are known.
    constexpr int kOfBlock = 128 / (kFragments * 8);  // chunks
    CUTE_UNROLL
    for (int first = 0; first < kBlocks * kChunks; first += kOfBlock) {
      decltype(epilogue.step_1)::Largest largest;
      CUTE_UNROLL
      for (int chunk = first; chunk < first + kOfBlock; ++chunk) {
        const int next = chunk + 1;
        CUTE_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          const int sum = (chunk % kChunks * kFragments + f) * 4;
          Value x[2][2];
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = Value(products.sums[chunk / kChunks][sum + i]);
          epilogue.apply(x, block[chunk / kChunks], operands[f], coordinates(at, chunk, f));
          if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
          epilogue.step_1.note(largest, x, coordinates(at, chunk, f), p.n);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) products.sums[chunk / kChunks][sum + i] = x[i / 2][i % 2];
        }
      }
      const auto inverse =
          epilogue.step_1.inverse(largest, coordinates(at, first, 0), p.m, p.n);
      CUTE_UNROLL
      for (int chunk = first; chunk < first + kOfBlock; ++chunk) {
        Value x[kFragments][2][2];
        CUTE_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i)
            x[f][i / 2][i % 2] = inverse.row[i / 2] *
                                 products.sums[chunk / kChunks][(chunk % kChunks * kFragments + f) * 4 + i];
        }
        store(p, x, at, chunk);
      }
    }
  }
  epilogue.finish();
  order.finish((tiles.count() - cluster + clusters - 1) / clusters);
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_bf16_bf16_e4m3_bias_bf16_quantize_pow2_pingpong_128x128x64_cluster2x1_stages6_0008f9c3(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that it is uniform
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
  cute::cluster_arrive_relaxed();  // no block signals another's barriers before they exist
  cute::cluster_wait();
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared, rank, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
  if (kClusterSize > 1) {  // nor after it has gone
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}
