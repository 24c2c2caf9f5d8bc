// gemm_sm90a_e4m3_e5m2_fp32_promoted_preactivation_fp32_relu_gradient_fp32_128x64x128_stages9_direct_363eba48
//
// D[m, n] = epilogue(A[m, k] B[k, n]): preactivation_fp32, relu_gradient_fp32
//   A e4m3 row, B e5m2 col, accumulated in fp32, D fp32 row
//   tile 128x64x128, cluster 1x1, 2 consumers, 9 stages, along_m, group 8, store direct
// Digest 363eba48759e76d969724a2a3698f66572ef9f6b0d6ce7d60176e79a32b0e523; `warploom show` prints this file.
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
constexpr int kTileM = 128, kTileN = 64, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // warpgroups, beside one producer warpgroup
constexpr int kSharing = 2;    // consumers that share a tile, each with some of its rows
constexpr int kTurns = kConsumers / kSharing;  // tiles in work: one is finished under the other's products
constexpr int kStages = 9;
constexpr int kGroup = 8;
constexpr int kRows = 128, kColumns = 64;  // of wgmma in a tile
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // of 64 rows, a consumer's
constexpr int kCount = kColumns / 2;  // accumulators of a thread in 64 rows of wgmma
constexpr int kChunkColumns = 32;  // a block is finished by chunks
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
  float* d;  // D[m][pitch]
  float* preactivation_0;  // z[m][pitch]
  float* activation_gradient_1;  // dy[m][pitch]
  int64_t d_pitch;  // elements between rows of D
  int64_t preactivation_0_pitch;  // elements between rows of z
  int64_t activation_gradient_1_pitch;  // elements between rows of dy
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // products summed
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d) == 384);
static_assert(OFFSET(Parameters, preactivation_0) == 392 && OFFSET(Parameters, activation_gradient_1) == 400);
static_assert(OFFSET(Parameters, d_pitch) == 408 && OFFSET(Parameters, preactivation_0_pitch) == 416);
static_assert(OFFSET(Parameters, activation_gradient_1_pitch) == 424 && OFFSET(Parameters, a_tail_rows) == 432);
static_assert(OFFSET(Parameters, m) == 436 && OFFSET(Parameters, n) == 440);
static_assert(OFFSET(Parameters, k) == 444);

// ---- Parts ----------------------------------------------------------------------------------
// D[64 x 64] += A[64 x 32] * B[32 x 64]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
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
  using Load = cute::SM90_TMA_LOAD_2D;
  static constexpr int kBytes = 8192;  // of one stage
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

// The consumers share each tile, the second two steps behind the first: else both would add up in fp32, and
// later finish the tile, at the same time, and the tensor core would wait. Named barrier 3 lets the second
// begin; by 4 the first knows that it has.
struct Order {
  static constexpr int kSteps = 2;  // 1 hides less, 3 leaves too few stages to the producer
  int consumer;

  __device__ __forceinline__ Order(int consumer, int, Position&) : consumer(consumer) {
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  __device__ __forceinline__ void begin() const {
    cutlass::arch::NamedBarrier::sync(256, consumer == 0 ? 4 : 3);
    if (consumer == 1) cutlass::arch::NamedBarrier::arrive(256, 4);
  }

  // The consumer has the products of a tile k.
  __device__ __forceinline__ void multiplied(int k_tile, int k_tiles) const {
    if (consumer == 0 && k_tile + 1 == min(kSteps, k_tiles)) cutlass::arch::NamedBarrier::arrive(256, 3);
  }

  __device__ __forceinline__ void pass(Position&) const {}

  // The second's last word must not be left pending.
  __device__ __forceinline__ void finish(int) const {
    if (consumer == 0) cutlass::arch::NamedBarrier::sync(256, 4);
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

// A fragment's two columns of a row of C or of a vector, read one by one; 0 past the last column.
template <class Element> struct Columns {
  Element value[2];

  Columns() = default;
  __device__ __forceinline__ Columns(const Element* row, const int (&column)[2], int n)
      : value{column[0] < n ? row[column[0]] : Element(0), column[1] < n ? row[column[1]] : Element(0)} {}

  __device__ __forceinline__ float operator[](int j) const { return float(value[j]); }
};

// Stores a fragment's two columns of a row one by one, none past the last column.
template <class Element>
__device__ __forceinline__ void write(Element* row, const int (&column)[2], int n, const float (&x)[2]) {
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j)
    if (column[j] < n) row[column[j]] = Element(x[j]);
}

// Stores what passes here to z, which has D's rows and columns.
template <class Element> struct Preactivation {
  Element* z;
  int64_t pitch;

  __device__ __forceinline__ void apply(const float (&x)[2][2], const Coordinates& at, int m, int n) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int row = at.row[i];
      asm volatile("" : "+r"(row));  // else addresses are kept for the next 64 rows, and spill
      if (row < m) write(z + row * pitch, at.column, n, x[i]);
    }
  }

  __device__ __forceinline__ void finish() const {}
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

// The steps between accumulators and D, in order. What a step reads once for 64 rows of wgmma is loaded
// once a tile; what it reads of a fragment a chunk ahead, so that the latency hides under the products or
// the chunk before.
struct Epilogue {
  struct Block {
  };
  struct Operands {
    ActivationGradient<ReluGradient, float>::Operand step_1;
  };
  int m, n;
  Preactivation<float> step_0;
  ActivationGradient<ReluGradient, float> step_1;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.preactivation_0, p.preactivation_0_pitch},
        step_1{p.activation_gradient_1, p.activation_gradient_1_pitch} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {};
  }

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_1.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block,
                                        const Operands& operands, const Coordinates& at) {
    step_0.apply(x, at, m, n);
    step_1.apply(x, operands.step_1);
  }

  __device__ __forceinline__ void finish() const {
    step_0.finish();
  }
};

// Two neighbours in a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two values of a row as D holds them.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) { return { {x[0], x[1]} }; }

// D leaves from registers, predicated: for pitches and addresses that TMA cannot write.
struct Store {
  __device__ __forceinline__ Store(uint8_t*, int) {}

  // Stores one chunk of the consumer's part of the tile, which starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const Place& at, int chunk) {
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const Coordinates place = coordinates(at, chunk, f);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (place.row[i] >= p.m) continue;
        ElementD* row = p.d + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n) row[place.column[j]] = pair.value[j];
      }
    }
  }

  __device__ __forceinline__ void finish() const {}
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  FullBarrier full[kStages];    // the producers' bytes have arrived
  EmptyBarrier empty[kStages];  // every consumer that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 222208);

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
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Expect first: the barrier then cannot complete before every byte, its peers' too, is here.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK);
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

// The sums of one tile's products. The tensor core keeps about 14 bits of a sum of fp8 products, so it adds
// up one tile k at a time; the rest is done in fp32 registers, under the other consumer's products.
struct Products {
  static constexpr int kBanks = 1;  // accumulators of 64 rows that MMAs in flight may have
  Accumulator sums[kBlocks][kCount], partial[kBanks][kCount];

  // Issues the products of one stage and 64 rows.
  __device__ __forceinline__ void issue(int block, uint64_t rows, uint64_t columns) {
    fence(partial[block % kBanks]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step)
      Wgmma::fma(rows + block * kBlockRows + step * RowOperand::kStep, columns + step * ColumnOperand::kStep,
                 partial[block % kBanks], step > 0);
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
      for (int i = 0; i < kCount; ++i) sums[block][i] += partial[block % kBanks][i];
      if (block + kBanks < kBlocks) issue(block + kBanks, rows, columns);
    }
  }

  __device__ __forceinline__ void first(uint64_t rows, uint64_t columns) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) sums[i / kCount][i % kCount] = 0;
    issue(rows, columns);
    promote(rows, columns);
  }

  // Adds the products of the next stage, and lets go of the stage before.
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
  const int part = consumer % kSharing, turn = consumer / kSharing;
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  const Order order(consumer, k_tiles, position);
  Store store(nullptr, consumer);
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
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i / 2][i % 2] = Value(products.sums[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f], block[chunk / kChunks], operands[f], coordinates(at, chunk, f));
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
  }
  epilogue.finish();
  order.finish((tiles.count() - cluster + clusters - 1) / clusters);
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e5m2_fp32_promoted_preactivation_fp32_relu_gradient_fp32_128x64x128_stages9_direct_363eba48(const __grid_constant__ Parameters p) {
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
