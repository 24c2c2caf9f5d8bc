// gemm_sm90a_e4m3_e4m3_e5m2_scale_row_gate_silu_halves_stochastic_rounding_128x128x128_cluster2x1_stages7_direct_ec6f0b00
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_row, gate_silu_halves, stochastic_rounding
//   A e4m3 row, B e4m3 col, accumulated in fp32, D e5m2 row
//   tile 128x128x128, cluster 2x1, 2 consumers, 7 stages, along_m, swizzle 8, store direct
// Digest ec6f0b00841960120288efbf57964330f7290bf8e6d9d59e7f090ffaf381f643; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 and 2, the consumers: wgmma on 64 rows of the CTA's tile each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 64 accumulators.
//   Its epilogue takes 64 columns at a time, to save registers.
// Shared memory: 229488 bytes; the launch asks for 230400 of 232448
//   a, b         7 stages * (16384 + 16384) = 229376
//   full, empty  7 stages * 2 * 8 = 112
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  4 arrivals: 2 consumers of 2 CTAs
// cluster     all that arrive  barriers, at start and exit   all threads of 2 CTAs
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
using ElementD = cutlass::float_e5m2_t; using Accumulator = float;
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 128, kTileN = 128, kTileK = 128;
constexpr int kClusterM = 2, kClusterN = 1, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 2;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 7;
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
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cutlass::float_e5m2_t* d;  // D[m][pitch]
  float* scale_0;  // scale[m]
  const uint2* rounding_2;  // [2]: seeds random numbers
  int64_t d_pitch;  // elements between rows of D
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of gate and up, twice those of D
  int32_t k;  // columns of A, rows of B
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, d) == 384);
static_assert(OFFSET(Parameters, scale_0) == 392 && OFFSET(Parameters, rounding_2) == 400);
static_assert(OFFSET(Parameters, d_pitch) == 408 && OFFSET(Parameters, a_tail_rows) == 416);
static_assert(OFFSET(Parameters, m) == 420 && OFFSET(Parameters, n) == 424);
static_assert(OFFSET(Parameters, k) == 428);

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
  static constexpr int kRows = 128, kRowBytes = 128;  // of the tile
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next
  static constexpr uint16_t kReceivers = (1 << kClusterSize) - 1;

  // Multicasts the tile's rows from `first` on, as many as the map's box has, to the whole cluster.
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k, int first) {
    cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
        kReceivers, kEvictNormally, tile + first * kRowBytes,
        k, 0, 0, (n + first) / 16);
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

// Philox4x32 (Salmon et al., 2011; 7 rounds, key 0).
__device__ __forceinline__ uint4 philox(uint4 x) {
  CUTE_UNROLL
  for (int round = 0; round < 7; ++round) {
    uint64_t first, second;  // not by *: the compiler would add products of upper halves, which are 0
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(first) : "r"(x.x), "r"(0xd2511f53u));
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(second) : "r"(x.z), "r"(0xcd9e8d57u));
    x = make_uint4(uint32_t(second >> 32) ^ x.y ^ round * 0x9e3779b9u, uint32_t(second),
                   uint32_t(first >> 32) ^ x.w ^ round * 0xbb67ae85u, uint32_t(first));
  }
  return x;
}

constexpr int kDropped = 21;  // bits of fp32's 23, that D has not

// A number is added to the bits that D has not, which are then left out. D's subnormal numbers are those of
// fp32 here, so that both have the same bits. An infinity stays one.
__device__ __forceinline__ float rounded(float value, uint32_t number) {
  constexpr float kSmallest = 0x1p-112f, kBack = 1.f / kSmallest;
  const uint32_t bits = (__float_as_uint(__fmul_rn(value, kSmallest)) + number) & ~((1u << kDropped) - 1);
  return __fmul_rn(__uint_as_float(bits), kBack);
}

// Whether one of the values is NaN.
template <int kPairs> __device__ __forceinline__ bool any_nan(const float (&x)[kPairs][2]) {
  static_assert(kPairs % 2 == 0);
  uint32_t found = 0;
  CUTE_UNROLL
  for (int i = 0; i < kPairs; i += 2)
    asm("{\n.reg .pred nan;\n"
        "setp.ne.u32 nan, %0, 0;\n"
        "setp.nan.or.f32 nan, %1, %2, nan;\n"
        "setp.nan.or.f32 nan, %3, %4, nan;\n"
        "selp.u32 %0, 1, 0, nan;\n}"
        : "+r"(found) : "f"(x[i][0]), "f"(x[i][1]), "f"(x[i + 1][0]), "f"(x[i + 1][1]));
  return found != 0;
}

// Rounds to one of the two neighbours in D's type, at random, the value being the mean. Random words
// are Philox of what the same function makes of a state, with the place in D added bit by bit.
// 8 values share four, as threads have them: rows r and r + 8, columns c, c + 1, c + 8 and c + 9. Word
// 2 j + i is of row r + 8 i: its lowest kDropped bits are the number of column c + 8 j, its highest that of
// the next.
struct StochasticRounding {
  uint4 state;

  __device__ __forceinline__ explicit StochasticRounding(const uint2* from) {
    const uint2 low = from[0], high = from[1];
    state = philox(make_uint4(low.x, low.y, high.x, high.y));
  }

  // The third word tells these numbers from those of casts, which have 0 and 1.
  __device__ __forceinline__ uint4 words(int row, int column) const {
    return philox(make_uint4((row & ~8) ^ state.x, (column & ~9) ^ state.y, 2 ^ state.z, state.w));
  }

  // Chunks of an even number of fragments start at multiples of 16 columns of D.
  static constexpr int kTogether = kFragments % 2 == 0 ? 2 : 1;

  // What stands outside of D is rounded too, and not stored. NaN, whose bits could become a number's, is put
  // back after all values are rounded: nothing else branches, so that groups of values are rounded under each
  // other's latency.
  __device__ __forceinline__ void round(Value (&x)[kFragments][2][2], const TileCoord& at, int chunk) const {
    uint32_t nan[(kFragments + 7) / 8] = {};  // a bit for each value
    const bool unusual = any_nan(reinterpret_cast<const float(&)[2 * kFragments][2]>(x));
    if (unusual) {
      CUTE_UNROLL
      for (int i = 0; i < 4 * kFragments; ++i) {
        const float value = x[i / 4][i / 2 % 2][i % 2];
        if (value != value) nan[i / 32] |= 1u << i % 32;
      }
    }
    CUTE_UNROLL
    for (int f = 0; f < kFragments; f += kTogether) {
      const Coordinates place = coordinates(at, chunk, f);
      const uint4 four = words(place.row[0], place.column[0]);
      CUTE_UNROLL
      for (int g = 0; g < kTogether; ++g) {
        const bool right = kTogether == 2 ? g == 1 : (place.column[0] & 8) != 0;
        const uint32_t word[2] = {right ? four.z : four.x, right ? four.w : four.y};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& value = x[f + g][i / 2][i % 2];
          value = rounded(
              value, i % 2 ? word[i / 2] >> (32 - kDropped) : word[i / 2] & ((1u << kDropped) - 1));
        }
      }
    }
    if (unusual) {
      CUTE_UNROLL
      for (int i = 0; i < 4 * kFragments; ++i)
        if (nan[i / 32] >> i % 32 & 1) x[i / 4][i / 2 % 2][i % 2] = __uint_as_float(0x7fc00000);
    }
  }
};

// The steps from accumulators to D, in order. Operands of a block of 64 rows are loaded once a tile.
struct Epilogue {
  struct Block {
    ScaleRow::Operand step_0;
  };
  int m, n;  // past the last row and column
  ScaleRow step_0;
  Gate<Silu, Up> step_1;
  StochasticRounding step_2;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : m(p.m),
        n(p.n),
        step_0{p.scale_0},
        step_1{},
        step_2{p.rounding_2} {}

  __device__ __forceinline__ Block load_block(const Coordinates& at) const {
    return {
        step_0.load(at, m, n / 2)};
  }

  __device__ __forceinline__ void apply(Value (&of_product)[2][2][2], Value (&x)[2][2],
                                        const Block& block) {
    step_0.apply(of_product[0], block.step_0);
    step_0.apply(of_product[1], block.step_0);
    step_1.apply(of_product, x);
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Converts two adjacent values of a row to D's type: round to nearest even; overflow and infinities saturate,
// NaN stays NaN.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(x[1]), "f"(x[0]));
  return reinterpret_cast<const Pair&>(bits);
}

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
        ElementD* row = p.d + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n / 2) row[place.column[j]] = pair.value[j];
      }
    }
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 230400);

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const Tiles tiles(p);
  const int k_tiles = (p.k + kTileK - 1) / kTileK;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = cluster; tile < tiles.count(); tile += clusters) {
    const TileCoord at = tiles.at(tile, rank);
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = !tail ? kTileM : at.m < p.m ? p.a_tail_rows : 0;  // 0: all of its rows are past the last
    const int b_first = rank * (OperandB::kRows / kClusterM);  // of the rows that this CTA multicasts
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      // Before any copy: the phase cannot complete without all bytes, those that peers multicast too.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      if (a_rows > 0) OperandA::load(a_map, full, shared.a[position.stage], at.m, k_tile * kTileK);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, k_tile * kTileK, b_first);
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

// Arrives at the empty barrier of a stage in every CTA of the cluster: each of them multicasts into this
// CTA's stage, and must not do so before this consumer has read it. One lane arrives for each CTA.
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
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 0, 1024, 1);
  Position position{0, 0};
  Store store;
  Epilogue epilogue(p);
  Epilogue::Block block[kBlocks];
  for (int tile = cluster + consumer / kSharing * clusters; tile < tiles.count();
       tile += kConsumers / kSharing * clusters) {
    TileCoord at = tiles.at(tile, rank);
    at.m += part * kBlocks * kWgmmaM;
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
    mainloop.finish(shared.empty[previous]);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        Value of_product[2][2][2];  // of the gate, and of up
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 8 + i;
          of_product[i / 4][i / 2 % 2][i % 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
        epilogue.apply(of_product, x[f], block[chunk / kChunks]);
      }
      epilogue.step_2.round(x, at, chunk);
      store(p, x, at, chunk);
    }
  }
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_e4m3_e4m3_e5m2_scale_row_gate_silu_halves_stochastic_rounding_128x128x128_cluster2x1_stages7_direct_ec6f0b00(const __grid_constant__ Parameters p) {
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
  // No CTA exits while another still multicasts to it or arrives at its barriers.
  cute::cluster_arrive();
  cute::cluster_wait();
}
