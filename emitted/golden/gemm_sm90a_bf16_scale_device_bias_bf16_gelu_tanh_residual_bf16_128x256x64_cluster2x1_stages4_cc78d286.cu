// gemm_sm90a_bf16_scale_device_bias_bf16_gelu_tanh_residual_bf16_128x256x64_cluster2x1_stages4_cc78d286
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_device, bias_bf16, gelu_tanh, residual_bf16
//   A bf16 row, B bf16 col, accumulated in fp32, D bf16 row
//   tile 128x256x64, cluster 2x1, 2 consumers, 4 stages, along_m, group 8, store tma
// Digest cc78d28656afec898501c55eb6d22371ceb3852731399e60920d4c0fe21b0420; `warploom show` prints this file.
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
constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr int kClusterM = 2, kClusterN = 1;
constexpr int kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // warpgroups, beside one producer warpgroup
constexpr int kSharing = 2;    // consumers that share a tile, each with some of its rows
constexpr int kTurns = kConsumers / kSharing;  // tiles in work: one is finished under the other's products
constexpr int kStages = 4;
constexpr int kGroup = 8;
constexpr int kRows = 128, kColumns = 256;  // of wgmma in a tile
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
  float* scale_0;  // scale[1]
  cutlass::bfloat16_t* bias_1;  // bias[n]
  cutlass::bfloat16_t* residual_3;  // C[m][pitch]
  int64_t residual_3_pitch;  // elements between rows of C
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // products summed
  float residual_3_beta;  // C is not read when this is 0
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d_map) == 384);
static_assert(OFFSET(Parameters, scale_0) == 512 && OFFSET(Parameters, bias_1) == 520);
static_assert(OFFSET(Parameters, residual_3) == 528 && OFFSET(Parameters, residual_3_pitch) == 536);
static_assert(OFFSET(Parameters, a_tail_rows) == 544 && OFFSET(Parameters, m) == 548);
static_assert(OFFSET(Parameters, n) == 552 && OFFSET(Parameters, k) == 556);
static_assert(OFFSET(Parameters, residual_3_beta) == 560);

// ---- Parts ----------------------------------------------------------------------------------
// D[64 x 256] += A[64 x 16] * B[16 x 256]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[128], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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
  static constexpr int kBytes = 32768;  // of one stage
  static constexpr int kRows = 256, kRowBytes = 128;  // of the tile
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

// Multiplies by a scalar in device memory, read once.
struct ScaleDevice {
  float scale;

  __device__ __forceinline__ ScaleDevice(const float* address) : scale(*address) {}

  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= scale;
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

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2u)): no
// cancellation in the negative tail.
struct GeluTanh {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    constexpr float kScale = 2.f * 0.79788456f * 1.44269504f;  // 2 sqrt(2 / pi) log2(e)
    return x * logistic2(x * fmaf(kScale * 0.044715f, x * x, kScale));
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

// The steps between accumulators and D, in order. What a step reads once for 64 rows of wgmma is loaded
// once a tile; what it reads of a fragment a chunk ahead, so that the latency hides under the products or
// the chunk before.
struct Epilogue {
  struct Block {
  };
  struct Operands {
    Bias<cutlass::bfloat16_t>::Operand step_1;
    Residual<cutlass::bfloat16_t>::Operand step_3;
  };
  int m, n;
  ScaleDevice step_0;
  Bias<cutlass::bfloat16_t> step_1;
  GeluTanh step_2;
  Residual<cutlass::bfloat16_t> step_3;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.scale_0},
        step_1{p.bias_1},
        step_2{},
        step_3{p.residual_3, p.residual_3_pitch, p.residual_3_beta} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {};
  }

  __device__ __forceinline__ Operands load(const Coordinates& at) const {
    return {
        step_1.load(at, m, n),
        step_3.load(at, m, n)};
  }

  __device__ __forceinline__ void apply(Value (&x)[2][2], const Block& block,
                                        const Operands& operands) {
    step_0.apply(x);
    step_1.apply(x, operands.step_1);
    step_2.apply(x);
    step_3.apply(x, operands.step_3);
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
  static constexpr int kSpan = 128;  // bytes of a staging row
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
  alignas(1024) uint8_t staging[32768];
  FullBarrier full[kStages];    // the producers' bytes have arrived
  EmptyBarrier empty[kStages];  // every consumer that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 230400);

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
        epilogue.apply(x[f], block[chunk / kChunks], operands[f]);
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
  }
  order.finish((tiles.count() - cluster + clusters - 1) / clusters);
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_bf16_scale_device_bias_bf16_gelu_tanh_residual_bf16_128x256x64_cluster2x1_stages4_cc78d286(const __grid_constant__ Parameters p) {
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
