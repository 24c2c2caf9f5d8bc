// attention_backward_sm90a_fp16_dim64_causal_96x128_cluster2_held_all_5f282b7d
//
// The gradients of o = p v, p = softmax(s) by rows, from do and the forward's lse, where
//   s = scale q k^T
//   p = exp(s - lse)    dp = do v^T    delta = rowsum(do * o) - dlse    ds = p (dp - delta)
//   dv = p^T do         dq = scale ds k         dk = scale ds^T q
//   fp16, head dimension 64, mask causal, fixed lengths
//   q tile 96, KV tile 128, 2 consumers, 2 stages, clusters of 2, dq added bulk, all of v held in registers
// Digest 5f282b7d6b0eb4761b2793b6a29f462e84b5b9db407fc7966b8c775e2dd2fe3b; `warploom show` prints this file.
//
// Three kernels, in the order of launch:
//   preprocess   a CTA of 256 threads per tile of q: delta, lse; zeros dq_sum
//   main         1 cluster of 2 CTAs of 384 threads per KV tile and KV head: dk, dv; adds to dq_sum
//   postprocess  a CTA of 256 threads per tile of q: dq from dq_sum
// Main, 1 CTA per SM; a step is a tile of q and do:
// Warpgroup 0, the producer: thread 0 issues the TMA loads of k, v, q, do and statistics
//   Warps 1 and 2, the writers: add dq of every second step each, by TMA reductions
// Warpgroups 1 and 2, the consumers: scores and gradients of 64 rows of k and v each, by wgmma
// Registers per thread: 168 at launch; setmaxnreg: producer 24, consumers 240 (24 + 2 * 240 <= 3 * 168)
//   A consumer thread has 64 accumulators of dk and dv; 16 registers of v;
//   in a step 96 of scores and dp, then 24 of dq
// Shared memory: 158720 bytes; the launch asks for 158720 of 232448
//   k            128 rows = 16384
//   v            128 rows = 16384
//   q            2 stages * 12288 = 24576
//   d_o          2 stages * 12288 = 24576
//   ds           2 stages * 24576 = 49152
//   sums         dq of one step in fp32 = 24576
//   statistics   2 stages * 768 = 1536
//   barriers     and padding = 1536
// Barriers         waited for by    guards                           a phase completes after
// k_full, v_full   consumers        k and v until they are loaded    1 arrival and the bytes of TMA
// q_full, do_full  consumers        a stage until it is filled       1 arrival and the bytes of TMA
// q_empty          the producer     q until dk is there              8 arrivals: consumer warps
// do_empty         the producer     do until dv is there             8 arrivals: consumer warps
// sums_full        a writer         dq until it is in shared memory  8 arrivals: consumer warps
// sums_empty       consumers        dq until TMA has read it         1 arrival of a writer
// named 1          all that arrive  ds until it is written           256 threads of consumers
// cluster          all that arrive  barriers, and what peers read    all threads of 2 CTAs
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
using Element = cutlass::half_t;
constexpr int kDim = 64, kSpan = 128;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kConsumers = 2;  // warpgroups, beside a producer
// Warps of the producer's warpgroup that add dq, after the one that loads: each has that of every second step.
constexpr int kFirstWriter = 1, kWriters = 2;
constexpr int kWgmmaM = 64, kQTile = 96, kKvTile = kWgmmaM * kConsumers;
// Tiles in flight: of q, of do, of ds.
constexpr int kStages = 2, kDoStages = 2, kDsStages = 2;
// CTAs that divide the query heads of a KV head among them: one has rank, rank + kCluster, ...
constexpr int kCluster = 2;
__device__ __forceinline__ int rank() { return blockIdx.x % kCluster; }
// Rows of k and v that a CTA has; of q, whose scores a warpgroup computes.
constexpr int kKvRows = 128, kQRows = 96;
// Parts that the columns of dq, dk and dv are divided into; columns of one.
constexpr int kParts = 1, kColumns = kDim / kParts;
constexpr int kScores = kQRows / 2, kGradients = kColumns / 2;  // accumulators of a thread: of p or dp, of dk or dv
// Parts that columns of dq transposed are divided into; columns of one.
constexpr int kQuerySplits = 2, kQueryN = 48;
constexpr int kQueries = kQueryN / 2;  // accumulators of a thread: of dq
constexpr int kPartSums = kQTile * kColumns;  // floats of dq of one q tile, of the columns of one part
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kStatistics = 2;  // of a row of q: lse in base 2, delta
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr auto kEvictLast = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Weights = uint32_t[(kQRows + 15) / 16][4];  // p^T or ds^T in 16 bits, as wgmma takes it from registers

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor q_map;  // [dim, seq, head, batch], by a q tile
  cute::TmaDescriptor k_map;  // [dim, seq, head, batch], by rows of a CTA
  cute::TmaDescriptor v_map;  // [dim, seq, head, batch], by rows of a CTA
  cute::TmaDescriptor do_map;  // [dim, seq, head, batch], by a q tile
  cute::TmaDescriptor dq_map;  // [dim, seq, head, batch], by a q tile
  cute::TmaDescriptor statistics_map;  // [row, statistics of q tiles], by a q tile
  float* lse;  // [batch, heads, seq_q]
  float* dlse;  // the gradient of lse, laid out as it is; may be null
  float* statistics;  // [head, q tile, kStatistics, row]
  float* dq_sum;  // [head, q tile, ...]: dq, as accumulators are laid out
  Element* o_rows;  // o, by the strides below
  Element* do_rows;  // do, by the strides below
  Element* dq_rows;  // dq, by the strides below
  Element* dk_rows;  // dk, by the strides below
  Element* dv_rows;  // dv, by the strides below
  int32_t* non_finite;  // [head, q tile]: whether do of a fully masked row is NaN or Inf
  int64_t o_batch;  // stride of o, in elements
  int64_t o_head;  // stride of o, in elements
  int64_t o_seq;  // stride of o, in elements
  int64_t do_batch;  // stride of do, in elements
  int64_t do_head;  // stride of do, in elements
  int64_t do_seq;  // stride of do, in elements
  int64_t dq_batch;  // stride of dq, in elements
  int64_t dq_head;  // stride of dq, in elements
  int64_t dq_seq;  // stride of dq, in elements
  int64_t dk_batch;  // stride of dk, in elements
  int64_t dk_head;  // stride of dk, in elements
  int64_t dk_seq;  // stride of dk, in elements
  int64_t dv_batch;  // stride of dv, in elements
  int64_t dv_head;  // stride of dv, in elements
  int64_t dv_seq;  // stride of dv, in elements
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t kv_tiles;  // of one head
  int32_t q_tiles;  // of one head
  int32_t section;  // kv heads whose tiles are processed together
  int32_t all_kv_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t dim;  // of the tensors, at most kDim
  int32_t right;  // row r sees no column after r + right
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 1024);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, do_map) == 384);
static_assert(OFFSET(Parameters, dq_map) == 512 && OFFSET(Parameters, statistics_map) == 640);
static_assert(OFFSET(Parameters, lse) == 768 && OFFSET(Parameters, dlse) == 776);
static_assert(OFFSET(Parameters, statistics) == 784 && OFFSET(Parameters, dq_sum) == 792);
static_assert(OFFSET(Parameters, o_rows) == 800 && OFFSET(Parameters, do_rows) == 808);
static_assert(OFFSET(Parameters, dq_rows) == 816 && OFFSET(Parameters, dk_rows) == 824);
static_assert(OFFSET(Parameters, dv_rows) == 832 && OFFSET(Parameters, non_finite) == 840);
static_assert(OFFSET(Parameters, o_batch) == 848 && OFFSET(Parameters, o_head) == 856);
static_assert(OFFSET(Parameters, o_seq) == 864 && OFFSET(Parameters, do_batch) == 872);
static_assert(OFFSET(Parameters, do_head) == 880 && OFFSET(Parameters, do_seq) == 888);
static_assert(OFFSET(Parameters, dq_batch) == 896 && OFFSET(Parameters, dq_head) == 904);
static_assert(OFFSET(Parameters, dq_seq) == 912 && OFFSET(Parameters, dk_batch) == 920);
static_assert(OFFSET(Parameters, dk_head) == 928 && OFFSET(Parameters, dk_seq) == 936);
static_assert(OFFSET(Parameters, dv_batch) == 944 && OFFSET(Parameters, dv_head) == 952);
static_assert(OFFSET(Parameters, dv_seq) == 960 && OFFSET(Parameters, heads) == 968);
static_assert(OFFSET(Parameters, seq_q) == 972 && OFFSET(Parameters, seq_k) == 976);
static_assert(OFFSET(Parameters, kv_tiles) == 980 && OFFSET(Parameters, q_tiles) == 984);
static_assert(OFFSET(Parameters, section) == 988 && OFFSET(Parameters, all_kv_heads) == 992);
static_assert(OFFSET(Parameters, sharing) == 996 && OFFSET(Parameters, dim) == 1000);
static_assert(OFFSET(Parameters, right) == 1004 && OFFSET(Parameters, scale) == 1008);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 96] += A[64 x 16] * B[16 x 96]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[48], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 96] += A[64 x 16] * B[16 x 96]; A in registers, B by descriptor, D in registers.
struct HeldWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[48], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, {%48,%49,%50,%51}, %52, add, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// D[64 x 64] += A[64 x 16] * B[16 x 64]; A in registers, B by descriptor, D in registers.
struct KeyWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// D[64 x 48] += A[64 x 16] * B[16 x 48]; A and B by descriptor, D in registers.
struct QueryWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[24], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, add, 1, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
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

struct BoxCoord { int row, batch; };  // of a box: two of the coordinates of a tensor map

__device__ __forceinline__ void load_box(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                         uint8_t* box, int column, BoxCoord coord, int head) {
  cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, box, column, coord.row, head,
                               coord.batch);
}

// Every sequence has p.seq_q rows and p.seq_k columns, and a batch of the tensor maps to itself.
struct Sequence {
  int batch;

  __device__ __forceinline__ int rows(const Parameters& p) const { return p.seq_q; }
  __device__ __forceinline__ int columns(const Parameters& p) const { return p.seq_k; }

  // Where TMA finds the kRows rows of q that begin with `row`, or those of k and v.
  template <int kRows> __device__ __forceinline__ BoxCoord rows_at(int row) const { return {row, batch}; }
  template <int kRows> __device__ __forceinline__ BoxCoord columns_at(int column) const { return {column, batch}; }

  // Where a row begins in a tensor of these strides.
  __device__ __forceinline__ int64_t row_at(int64_t batch_stride, int64_t head_stride, int64_t row_stride, int head,
                                            int row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
  __device__ __forceinline__ int64_t lse_at(const Parameters& p, int head, int row) const {
    return (int64_t(batch) * p.heads + head) * p.seq_q + row;
  }
};

struct TileCoord {
  Sequence sequence;
  int head, row;
};

// Where a KV tile is: its sequence and KV head, its first column, and the number of its first query
// head's first q tile, in the storage of statistics and sums.
struct KvTileCoord {
  Sequence sequence;
  int head, column, first_tile;
};
__device__ __forceinline__ KvTileCoord kv_tile_coord(const Parameters& p, int tile, int all_kv_head) {
  const int kv_heads = p.heads / p.sharing, batch = all_kv_head / kv_heads;
  return { {batch}, all_kv_head - batch * kv_heads, tile * kKvTile, all_kv_head * p.sharing * p.q_tiles};
}

// Where the q tile with that number is.
__device__ __forceinline__ TileCoord q_tile_coord(const Parameters& p, int number) {
  const int all_head = number / p.q_tiles, batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (number - all_head * p.q_tiles) * kQTile};
}

// Where a row of k or v begins in a tensor of these strides.
__device__ __forceinline__ int64_t column_at(const Sequence& sequence, int64_t batch_stride,
                                             int64_t head_stride, int64_t column_stride, int head, int column) {
  return sequence.batch * batch_stride + head * head_stride + column * column_stride;
}

// Rows of a tensor in shared memory: boxes of the head dimension side by side, a swizzled row of kSpan
// bytes per sequence row.
template <int kRows> struct Tile {
  static constexpr int kBoxBytes = kRows * kSpan, kBytes = kBoxes * kBoxBytes;

  // Starts the loads of all boxes; rows past the end of the sequence become zeros.
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                              uint8_t* tile, BoxCoord coord, int head) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int box = 0; box < kBoxes; ++box)
      load_box(map, full, hint, tile + box * kBoxBytes, box * kBoxColumns, coord, head);
  }

  // From the tile's start to where the head dimension's 16 columns `step` begin, in a descriptor.
  __device__ __forceinline__ static constexpr int columns(int step) {
    return (step * 32 / kSpan * kBoxBytes + step * 32 % kSpan) / 16;
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

// Releases a stage: each warp arrives for itself, and the barrier counts the warps.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// The softmax is of scale q k^T.
struct Scaling {
  float exponent;  // the factor of a score in the argument of exp2

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : exponent(p.scale * kLog2E) {}
};

constexpr uint32_t kHidden = 0xff800000;  // the score of what does not attend: -inf

// ---- Work: a KV tile of one KV head, and a part of what is to be done for it -------------------------
// Its q tiles are [begin, end) of each query head; in storage they are numbered from `first_tile` on.
struct Work {
  Sequence sequence;
  int head, column;  // of k; the tile's first
  int part;          // the columns of dq are [part * kColumns, (part + 1) * kColumns)
  int begin, end, first_tile;
};

constexpr int kKvBytes = Tile<kKvRows>::kBytes, kQBytes = Tile<kQTile>::kBytes;
constexpr int kStatisticsBytes = kStatistics * kQTile * 4;
constexpr int kDsBoxBytes = kQTile * 128;  // ds by rows of q: 64 columns a box

struct SharedStorage {
  alignas(1024) uint8_t k[kKvBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t v[kKvBytes];
  alignas(1024) uint8_t q[kStages][kQBytes];
  alignas(1024) uint8_t d_o[kDoStages][kQBytes];
  alignas(1024) uint8_t ds[kDsStages][kKvTile / kWgmmaM][kDsBoxBytes];
  alignas(128) float4 sums[kConsumers * 4][kQueries / 4][32];  // dq on its way out, by warps
  struct alignas(128) { float rows[kStatistics][kQTile]; } statistics[kStages];  // guarded by q's barriers
  FullBarrier k_full, v_full, q_full[kStages], do_full[kDoStages];  // TMA's bytes have arrived
  EmptyBarrier q_empty[kStages], do_empty[kDoStages];               // every reader is done with them
  EmptyBarrier sums_full[kWriters], sums_empty;  // the step's dq is laid down for its writer; TMA has read it
};
static_assert(sizeof(SharedStorage) <= 158720);

// The tile called `index`, in the order in which tiles are processed: by sections of heads whose q, do
// and dq fit L2 together; within one the first tiles of all its heads, then the next: where columns right
// of the diagonal are hidden the first are the longest.
__device__ __forceinline__ Work locate(const Parameters& p, int index) {
  const int part = index % kParts;
  index /= kParts;
  const int section = index / (p.section * p.kv_tiles), offset = index - section * p.section * p.kv_tiles;
  const int heads = min(p.section, p.all_kv_heads - section * p.section);
  const int tile = offset / heads, all_head = section * p.section + offset - tile * heads;
  const KvTileCoord at = kv_tile_coord(p, tile, all_head);
  const int end = at.sequence.rows(p);
  const int begin = max(0, min(end, at.column - p.right));
  // A CTA has nothing to do where no row attends to its tile, or its rank leaves it no query head.
  const bool any = begin < end && rank() < p.sharing;
  return {at.sequence, at.head, at.column, part, begin / kQTile, any ? (end + kQTile - 1) / kQTile : 0,
          at.first_tile};
}

// The index of the CTA's work.
__device__ __forceinline__ int number(const Parameters&, SharedStorage&) { return blockIdx.x / kCluster; }

// The q tile in place n of [begin, end). Nothing decides which of two CTAs adds to the dq of one q tile first.
__device__ __forceinline__ int walk(const Parameters&, const Work&, int n) { return n; }

// ---- Producer: one thread keeps q and do coming --------------------------------------------------
// Starts the load of v.
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, const Work& work,
                                            BoxCoord columns) {
  shared.v_full.arrive_and_expect_tx(kKvBytes);
  Tile<kKvRows>::load(p.v_map, shared.v_full, kEvictFirst, shared.v, columns, work.head);
}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, const Work& work) {
  if (work.begin >= work.end) return;
  const int column = work.column;
  const BoxCoord columns = work.sequence.columns_at<kKvRows>(column);
  shared.k_full.arrive_and_expect_tx(kKvBytes);
  Tile<kKvRows>::load(p.k_map, shared.k_full, kEvictFirst, shared.k, columns, work.head);
  Position position{0, 1};  // a new barrier has completed the phase of parity 1: the first waits return
  CUTE_NO_UNROLL
  for (int i = rank(); i < p.sharing; i += kCluster) {
    const int head = work.head * p.sharing + i;
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n) {
      const int m = walk(p, work, n);
      const BoxCoord rows = work.sequence.rows_at<kQTile>(m * kQTile);
      // Where do of a fully masked row is not finite, preprocess left a copy of do in dq, with zeros there. Read
      // before the waits, to be there early.
      const auto& do_map = p.non_finite[work.first_tile + i * p.q_tiles + m] ? p.dq_map : p.do_map;
      FullBarrier &q_full = shared.q_full[position.stage], &do_full = shared.do_full[position.stage];
      shared.q_empty[position.stage].wait(position.phase);
      q_full.arrive_and_expect_tx(kQBytes + kStatisticsBytes);
      Tile<kQTile>::load(p.q_map, q_full, kEvictLast, shared.q[position.stage], rows, head);
      cute::SM90_TMA_LOAD_2D::copy(&p.statistics_map, reinterpret_cast<uint64_t*>(&q_full), kEvictLast,
                                   shared.statistics[position.stage].rows, 0,
                                   kStatistics * (work.first_tile + i * p.q_tiles + m));
      if (i == rank() && n == work.begin) load_values(p, shared, work, columns);
      shared.do_empty[position.stage].wait(position.phase);
      do_full.arrive_and_expect_tx(kQBytes);
      Tile<kQTile>::load(do_map, do_full, kEvictLast, shared.d_o[position.stage], rows, head);
      position.advance();
    }
  }
}

// ---- Consumer: 64 rows of k and v ----------------------------------------------------------------
// Keeps the compiler from moving accumulators across asynchronous MMAs.
template <int kCount> __device__ __forceinline__ void fence(float (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

__device__ __forceinline__ uint32_t pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two fragments of 8 columns side by side are wgmma's A of 16: the accumulator's layout is A's.
__device__ __forceinline__ void pack(Weights& weights, const float (&scores)[kScores]) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 2; ++i) weights[i / 4][i % 4] = pair(scores[2 * i], scores[2 * i + 1]);
}

// Issues scores = rows columns^T; they run on while the warpgroup goes on. s^T = k q^T, dp^T = v do^T.
__device__ __forceinline__ void multiply_scores(float (&scores)[kScores], uint64_t rows, uint64_t columns) {
  fence(scores);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDim / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(rows + Tile<kKvRows>::columns(step), columns + Tile<kQTile>::columns(step), scores, step > 0);
  cute::warpgroup_commit_batch();
}

// dq^T = k^T ds^T: a warpgroup has 64 rows of the head dimension, and the columns of q or a part of them.
// Issues the MMA over the rows of k.
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer % kQuerySplits * kQueryN * 128 / 16;
  k += consumer / kQuerySplits * (kWgmmaM / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(k + step * QueryWgmma::kK * kSpan / 16, ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16,
                    dq, step > 0);
  cute::warpgroup_commit_batch();
}

// Takes the sums of a q tile apart: `take` gets (row, column, values of 8 columns). Of a fragment of 8
// rows of q lane l holds two of column l / 4, then two of the column 8 further on.
constexpr int kPieces = kPartSums / 32;
template <class Take> __device__ __forceinline__ void unpack(const float4* sums, int piece, Take&& take) {
  constexpr int kFragments = kQueryN / 8;
  const int pair = piece % 4, columns = piece / 4 % (kColumns / 16), fragment = piece / 4 / (kColumns / 16);
  const int warp = (columns / 4 * kQuerySplits + fragment / kFragments) * 4 + columns % 4;
  float values[2][2][8];  // of rows, of columns further on
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float4 four = sums[(warp * kFragments + fragment % kFragments) * 32 + i * 4 + pair];
    values[0][0][i] = four.x, values[1][0][i] = four.y;
    values[0][1][i] = four.z, values[1][1][i] = four.w;
  }
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i)
    take(fragment * 8 + pair * 2 + i % 2, columns * 16 + i / 2 * 8, values[i % 2][i / 2]);
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Whether rows [row, row + kQRows) and columns [column, column + 64) hold pairs that do not attend.
__device__ __forceinline__ bool partial(const Parameters& p, const Sequence& sequence, int row, int column) {
  return column + kWgmmaM > sequence.columns(p) || column + kWgmmaM - 1 > row + p.right;
}

// Hides what does not attend. wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, which are
// columns of the scores, and of every 8 columns, rows of q, 2 (l % 4) and the next.
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, const Sequence& sequence, int row,
                                     int column) {
  row += threadIdx.x % 4 * 2;
  column += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r, column += 8) {
    const int begin = column - p.right - row;
    const int end = column >= sequence.columns(p) ? 0 : kQRows;
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int offset = i / 2 * 8 + i % 2;
      if (offset >= end || offset < begin) scores[i / 2 * 4 + 2 * r + i % 2] = __uint_as_float(kHidden);
    }
  }
}

// The statistics of the two rows of q that a thread has of the 8 of fragment i.
__device__ __forceinline__ float2 statistics(const float* of_rows, int i) {
  return reinterpret_cast<const float2*>(of_rows)[i * 4 + threadIdx.x % 4];
}

// A q tile: its first row, its number in storage, and whether the step's number is odd.
struct Step {
  int row, tile;
  uint32_t parity;
};

// What a consumer's steps work with, beside registers.
struct Consumer {
  const Parameters& p;
  SharedStorage& shared;
  const Work& work;
  uint64_t k, v, q, d_o, ds;  // descriptors; of q and do the first stage's
  int consumer, part;  // its number; the work's part
  int row;             // of a q tile: the first that it has scores of
  // Of its 64 rows of the KV tile: which 64; from the tile's start to them, in a descriptor; the first's column.
  int box, own, column;
  Scaling scaling;

  // From all columns of the head dimension to those of a part, in a descriptor.
  template <int kRows> __device__ __forceinline__ static int columns(int part) {
    return part * (kBoxes / kParts) * Tile<kRows>::kBoxBytes / 16;
  }
  __device__ __forceinline__ uint64_t staged_q(Position at) const { return q + at.stage * kQBytes / 16; }
  __device__ __forceinline__ uint64_t staged_do(Position at) const { return d_o + at.stage * kQBytes / 16; }
  __device__ __forceinline__ const uint8_t* own_ds(Step step) const {
    return shared.ds[step.parity][box];
  }
  __device__ __forceinline__ uint64_t staged_ds(Step step) const {
    return ds + step.parity * (kKvTile / kWgmmaM * kDsBoxBytes / 16);
  }
};

// p = exp(s - lse); lse is inf for a fully masked row. s becomes p.
__device__ __forceinline__ void weigh(const Consumer& c, Weights& weights, float (&scores)[kScores], Step step,
                                      Position at) {
  const int row = step.row + c.row;
  if (partial(c.p, c.work.sequence, row, c.column)) mask(scores, c.p, c.work.sequence, row, c.column);
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 lse = statistics(c.shared.statistics[at.stage].rows[0] + c.row, i);
    CUTE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      float &x = scores[4 * i + j], &y = scores[4 * i + j + 1];
      const float low = fast_exp2(x * c.scaling.exponent - lse.x),
                  high = fast_exp2(y * c.scaling.exponent - lse.y);
      weights[i / 2][i % 2 * 2 + j / 2] = pair(low, high);
      x = low;
      y = high;
    }
  }
}

// dp becomes ds = p (dp - delta); `weights` are what weigh() left in the scores.
__device__ __forceinline__ void differentiate(const Consumer& c, float (&dp)[kScores],
                                              const float (&weights)[kScores], Position at) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = statistics(c.shared.statistics[at.stage].rows[1] + c.row, i);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j)
      dp[4 * i + j] = weights[4 * i + j] * (dp[4 * i + j] - (j % 2 ? delta.y : delta.x));
  }
}

// Writes p^T or ds^T transposed for all to read: rows of q, 64 rows of k side by side in a swizzled row of
// 128 bytes.
__device__ __forceinline__ void write(const Consumer& c, const uint8_t* box, const Weights& weights) {
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8,
            piece = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  const uint32_t address = cute::cast_smem_ptr_to_uint(box) + (c.row + row) * 128 + (piece ^ lane % 8) * 16;
  constexpr int kPairs = kQRows / 16;  // of fragments
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
                 ::"r"(address + i * 16 * 128), "r"(weights[i][0]), "r"(weights[i][1]), "r"(weights[i][2]),
                 "r"(weights[i][3])
                 : "memory");
  cutlass::arch::fence_view_async_shared();  // make the writes visible to wgmma before meet() lets it read
}

// Where the consumers meet: in a step, when all of ds is written; at the end, when all have multiplied.
__device__ __forceinline__ void meet() { cutlass::arch::NamedBarrier::sync(kConsumers * 128, 1); }

// Each warpgroup has 64 rows of k and v, and multiplies their gradients with p^T and ds^T as it computed them;
// ds goes through shared memory for dq.
//
// Issues gradient += weights rows. dv += p^T do, dk += ds^T q.
__device__ __forceinline__ void multiply_gradient(float (&gradient)[kGradients], const Weights& weights,
                                                  uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / KeyWgmma::kK; ++step)
    KeyWgmma::fma(weights[step], rows + step * KeyWgmma::kK * kSpan / 16, gradient, true);
  cute::warpgroup_commit_batch();
}

// dq leaves through two writers, warps beside the producer's: each has every second step's. What the consumers
// lay down one writer adds to the sums of its q tile, all at once, and releases the staging as soon as TMA has
// read it.
//
// Lays down a warpgroup's part of dq for the step's writer. It lies as the accumulators do, and as the sums do.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  c.shared.sums_empty.wait(step.parity ^ 1);
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i)
    c.shared.sums[warp][i][lane] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier lets the writer go
  release(c.shared.sums_full[step.parity]);
}

// Adds what every second step lays down, the steps whose parity is `writer`.
__device__ __forceinline__ void add(const Parameters& p, SharedStorage& shared, const Work& work,
                                    uint32_t writer) {
  uint32_t parity = 0, phase = 0;
  CUTE_NO_UNROLL
  for (int i = rank(); i < p.sharing; i += kCluster) {
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n, parity ^= 1) {
      if (parity != writer) continue;
      const int m = walk(p, work, n), sum_index = (work.first_tile + i * p.q_tiles + m) * kParts + work.part;
      shared.sums_full[writer].wait(phase);
      phase ^= 1;
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
                   ::"l"(p.dq_sum + int64_t(sum_index) * kPartSums),
                       "r"(cute::cast_smem_ptr_to_uint(shared.sums)),
                   "n"(kPartSums * 4), "l"(kEvictLast)
                   : "memory");
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();  // it is read
      shared.sums_empty.arrive();
    }
  }
}

// The warpgroup's 64 rows of v, of the first columns or all, in registers: the MMAs of every step would
// read them from shared memory again.
struct Held {
  static constexpr int kSteps = 4;  // of 16 columns
  uint32_t rows[kSteps][4];  // as wgmma takes its A: a warp's 16 rows by 16 columns, by quarters

  __device__ __forceinline__ void take(const Consumer& c) {
    c.shared.v_full.wait(0);
    const int lane = threadIdx.x % 32, row = c.consumer * kWgmmaM + threadIdx.x / 32 % 4 * 16 + lane % 16;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int offset = row * kSpan + step * 32 % kSpan + lane / 16 * 16;
      const uint32_t address = cute::cast_smem_ptr_to_uint(c.shared.v) +
                               step * 32 / kSpan * Tile<kKvRows>::kBoxBytes +
                               (offset ^ ((offset >> 3) & (kSpan - 16)));  // TMA's swizzle
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                   : "=r"(rows[step][0]), "=r"(rows[step][1]), "=r"(rows[step][2]), "=r"(rows[step][3])
                   : "r"(address)
                   : "memory");
    }
  }

  // Issues dp^T = v do^T.
  __device__ __forceinline__ void multiply(const Consumer& c, float (&dp)[kScores], uint64_t d_o) const {
    fence(dp);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kDim / HeldWgmma::kK; ++step) {
      const uint64_t columns = d_o + Tile<kQTile>::columns(step);
      if (step < kSteps)
        HeldWgmma::fma(rows[step], columns, dp, step > 0);
      else
        ScoresWgmma::fma(c.v + c.own + Tile<kKvRows>::columns(step), columns, dp, step > 0);
    }
    cute::warpgroup_commit_batch();
  }
};

// The steps of a consumer, one for each q tile: one after the other, so that the fewest registers are in use at
// a time. In a step dp's MMA is in flight while p is computed (ptxas may move exponentials behind the wait for
// it), dv's while ds is written, and dk's while dq leaves.
struct Steps {
  Held held;

  __device__ __forceinline__ void begin(const Consumer& c, Position) { held.take(c); }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kGradients], Step step,
                                       Position at) {
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights, ds;
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(at));
    c.shared.do_full[at.stage].wait(at.phase);
    held.multiply(c, dp, c.staged_do(at));
    cute::warpgroup_wait<1>();  // the scores are there; dp's MMAs run on
    fence(scores);
    weigh(c, weights, scores, step, at);
    cute::warpgroup_wait<0>();
    fence(dp);
    differentiate(c, dp, scores, at);
    multiply_gradient(dv, weights, c.staged_do(at) + c.columns<kQTile>(c.part));
    pack(ds, dp);
    // Nobody waits for a stage of ds: this one was read two steps ago, before the consumers met in the last
    // step.
    write(c, c.own_ds(step), ds);
    meet();
    multiply_query(dq, c.staged_ds(step), c.k + c.columns<kKvRows>(c.part), c.consumer);
    multiply_gradient(dk, ds, c.staged_q(at) + c.columns<kQTile>(c.part));
    cute::warpgroup_wait<1>();  // dv and dq are there; dk's MMAs run on
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[at.stage]);
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }
};

// The gradients of a cluster's CTAs are summed through distributed shared memory: each CTA lays its own
// down as the accumulators lie, in fragments of a warp's 16 rows and 8 columns, and sums some fragments over
// all CTAs, always in the order of ranks. They lie where k, v and the stages of q and do were.
//
// Fragments of a gradient: a warp's, a CTA's; those that a CTA sums, a warp of it at most.
constexpr int kWarps = kConsumers * 4, kWarpFragments = kGradients / 4, kFragments = kWarps * kWarpFragments;
constexpr int kOwnFragments = kFragments / kCluster, kWarpSums = (kOwnFragments + kWarps - 1) / kWarps;
constexpr int kFragmentBytes = 32 * sizeof(float4), kGradientBytes = kFragments * kFragmentBytes;
static_assert(kFragments % kCluster == 0 && 2 * kGradientBytes <= 2 * kKvBytes + (kStages + kDoStages) * kQBytes);
static_assert(sizeof(SharedStorage::k) + sizeof(SharedStorage::v) == OFFSET(SharedStorage, q));
static_assert(OFFSET(SharedStorage, d_o) - OFFSET(SharedStorage, q) == kStages * kQBytes);

// What the threads of any CTA wrote before is visible to all after. Those that have exited do not count.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Lays down the warp's fragments of a gradient.
__device__ __forceinline__ void lay(uint8_t* fragments, const float (&gradient)[kGradients], int warp) {
  float4* own = reinterpret_cast<float4*>(fragments) + warp * kWarpFragments * 32 + threadIdx.x % 32;
  CUTE_UNROLL
  for (int i = 0; i < kWarpFragments; ++i)
    own[i * 32] = {gradient[4 * i], gradient[4 * i + 1], gradient[4 * i + 2], gradient[4 * i + 3]};
}

// Loads from `address` in the shared memory of the CTA with that rank. Volatile keeps it after the barrier
// before and ahead of the next.
__device__ __forceinline__ float4 load_remote(uint32_t address, int rank) {
  float4 four;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
               "ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [remote];\n}"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address), "r"(rank));
  return four;
}

// Writes scale * the sums of the CTA's own fragments; `tile` is the gradient's at the tile's first row. Of
// a fragment lane l has two columns of row l / 4, then those of the row 8 further down.
__device__ __forceinline__ void store_sums(const Consumer& c, const uint8_t* fragments, Element* tile,
                                           int64_t row_stride, float scale, int warp) {
  const int rows = c.work.sequence.columns(c.p) - c.work.column, first = rank() * kOwnFragments;
  const uint32_t address = cute::cast_smem_ptr_to_uint(fragments) +
      (first * 32 + threadIdx.x % 32) * sizeof(float4);
  float4 sums[kWarpSums];
  CUTE_UNROLL
  for (int i = 0; i < kWarpSums; ++i) {
    const int own = min(i * kWarps + warp, kOwnFragments - 1);
    sums[i] = load_remote(address + own * kFragmentBytes, 0);
    CUTE_UNROLL
    for (int block = 1; block < kCluster; ++block) {
      const float4 more = load_remote(address + own * kFragmentBytes, block);
      sums[i] = {sums[i].x + more.x, sums[i].y + more.y, sums[i].z + more.z, sums[i].w + more.w};
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kWarpSums; ++i) {
    const int own = i * kWarps + warp;
    const int row = (first + own) / kWarpFragments * 16 + int(threadIdx.x) % 32 / 4;
    const int column = c.part * kColumns + (first + own) % kWarpFragments * 8 + int(threadIdx.x) % 4 * 2;
    if (own >= kOwnFragments || column >= c.p.dim) continue;
    Element* to = tile + row * row_stride + column;
    if (row < rows) *reinterpret_cast<uint32_t*>(to) = pair(sums[i].x * scale, sums[i].y * scale);
    if (row + 8 < rows)
      *reinterpret_cast<uint32_t*>(to + 8 * row_stride) = pair(sums[i].z * scale, sums[i].w * scale);
  }
}

__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[kGradients]) {
  const Parameters& p = c.p;
  const Work& work = c.work;
  const int warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  Element* const dk_tile =
      p.dk_rows + column_at(work.sequence, p.dk_batch, p.dk_head, p.dk_seq, work.head, work.column);
  Element* const dv_tile =
      p.dv_rows + column_at(work.sequence, p.dv_batch, p.dv_head, p.dv_seq, work.head, work.column);
  uint8_t *const of_dv = c.shared.k, *const of_dk = of_dv + kGradientBytes;
  meet();  // all have multiplied with k, v, q and do
  lay(of_dv, dv, warp);
  lay(of_dk, dk, warp);
  sync_cluster();  // the CTAs' fragments are there
  store_sums(c, of_dv, dv_tile, p.dv_seq, 1, warp);
  store_sums(c, of_dk, dk_tile, p.dk_seq, p.scale, warp);
  sync_cluster();  // shared memory must outlive the CTAs that read it
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // and what still adds dq from it
}

// ---- Mainloop -----------------------------------------------------------------------------------------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, const Work& work, int consumer) {
  constexpr int part = 0;
  const int box = consumer, own = box * kWgmmaM * kSpan / 16;
  constexpr int row = 0;
  const uint64_t k = matrix(shared.k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 1);
  const uint64_t v = matrix(shared.v, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 1);
  const uint64_t q = matrix(shared.q[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, 1);
  const uint64_t d_o = matrix(shared.d_o[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, 1);
  const uint64_t ds = matrix(shared.ds[0][0], kDsBoxBytes, 8 * 128, 1);
  const Consumer c{p, shared, work, k, v, q, d_o, ds, consumer, part, row, box, own,
                   work.column + box * kWgmmaM,
                   Scaling(p)};
  float dk[kGradients], dv[kGradients];
  CUTE_UNROLL
  for (int i = 0; i < kGradients; ++i) dk[i] = dv[i] = 0;
  fence(dk);  // else the compiler takes the zeros before setmaxnreg, and has too few registers for them there
  fence(dv);
  if (work.begin < work.end) {
    Steps steps;
    Position position{0, 0};
    const int count = (work.end - work.begin) * ((p.sharing - rank() + kCluster - 1) / kCluster);
    shared.k_full.wait(0);
    steps.begin(c, position);  // waits for v, too
    int n = work.begin, tile = work.first_tile + rank() * p.q_tiles;  // of the head's first q tile
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const int m = walk(p, work, n);
      steps.next(c, dk, dv, {m * kQTile, tile + m, i % 2u}, position);
      position.advance();
      if (++n == work.end) {  // on to the next head
        n = work.begin;
        tile += kCluster * p.q_tiles;
      }
    }
  }
  store_gradients(c, dk, dv);
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_backward_sm90a_fp16_dim64_causal_96x128_cluster2_held_all_5f282b7d(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q_map, &p.k_map, &p.v_map, &p.do_map, &p.statistics_map})
      cute::prefetch_tma_descriptor(map);
    shared.k_full.init(1);
    shared.v_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(4 * kConsumers);
    }
    for (int i = 0; i < kDoStages; ++i) {
      shared.do_full[i].init(1);
      shared.do_empty[i].init(4 * kConsumers);
    }
    for (int i = 0; i < kWriters; ++i) shared.sums_full[i].init(4 * kConsumers);
    shared.sums_empty.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const Work work = locate(p, number(p, shared));
  if (work.column >= work.sequence.columns(p)) return;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 0) produce(p, shared, work);
    const int writer = int(threadIdx.x) / 32 - kFirstWriter;
    if (threadIdx.x % 32 == 0 && writer >= 0 && writer < kWriters) add(p, shared, work, writer);
  } else {
    cutlass::arch::warpgroup_reg_alloc<240>();
    consume(p, shared, work, warpgroup - 1);
  }
}

// ---- Preprocess and postprocess: one CTA per q tile ----------------------------------------------
// Threads of a CTA; those that share a row, 8 columns each.
constexpr int kRowThreads = 256, kRowLanes = 8;

struct alignas(16) Eight {
  Element values[8];
};

// Whether a row is fully masked: its log-sum-exp is that of no score.
__device__ __forceinline__ bool is_fully_masked(const Parameters&, int, float lse) {
  return lse == __int_as_float(0xff800000);
}

// Copies a q tile of do to where dq will be, with zeros in fully masked rows: main reads it there. Such rows
// have weights of 0, but 0 times the NaN or Inf of one would be NaN in all of dk and dv.
__device__ __forceinline__ void copy_unmasked(const Parameters& p, const TileCoord& at) {
  const int column = threadIdx.x % kRowLanes * 8;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x / kRowLanes; i < kQTile; i += kRowThreads / kRowLanes) {
    const int row = at.row + i;
    if (row >= at.sequence.rows(p) || column >= p.dim) continue;
    const bool masked = is_fully_masked(p, at.head, p.lse[at.sequence.lse_at(p, at.head, row)]);
    const int64_t do_row = at.sequence.row_at(p.do_batch, p.do_head, p.do_seq, at.head, row);
    const int64_t dq_row = at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, row);
    *reinterpret_cast<uint4*>(p.dq_rows + dq_row + column) =
        masked ? uint4{0, 0, 0, 0} : *reinterpret_cast<const uint4*>(p.do_rows + do_row + column);
  }
}

// delta = rowsum(do * o) - dlse and lse in base 2, for main to read; zeros where main adds dq.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90a_fp16_dim64_causal_96x128_cluster2_held_all_5f282b7d_preprocess(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const TileCoord at = q_tile_coord(p, blockIdx.x);
  const int rows = at.sequence.rows(p);
  if (at.row >= rows) return;
  bool non_finite = false;  // whether do of a fully masked row is
  const int column = threadIdx.x % kRowLanes * 8;
  float* statistics = p.statistics + int64_t(blockIdx.x) * (kStatistics * kQTile);
  CUTE_UNROLL
  for (int i = threadIdx.x / kRowLanes; i < kQTile; i += kRowThreads / kRowLanes) {
    const int row = at.row + i;
    float delta = 0;
    if (row < rows && column < p.dim) {
      const int64_t o_row = at.sequence.row_at(p.o_batch, p.o_head, p.o_seq, at.head, row);
      const int64_t do_row = at.sequence.row_at(p.do_batch, p.do_head, p.do_seq, at.head, row);
      const Eight o = *reinterpret_cast<const Eight*>(p.o_rows + o_row + column);
      const Eight d_o = *reinterpret_cast<const Eight*>(p.do_rows + do_row + column);
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j) delta += float(o.values[j]) * float(d_o.values[j]);
    }
    CUTE_UNROLL
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    if (threadIdx.x % kRowLanes == 0) {
      const float infinity = __int_as_float(0x7f800000);  // as lse it makes weights 0
      float lse = infinity;
      if (row < rows) {
        const int64_t lse_index = at.sequence.lse_at(p, at.head, row);
        lse = p.lse[lse_index];
        const float dlse = p.dlse == nullptr ? 0 : p.dlse[lse_index];
        const bool masked = is_fully_masked(p, at.head, lse);
        if (masked && !(fabsf(delta) < infinity)) {  // o is 0 there, times NaN or Inf
          non_finite = true;
          delta = 0;
        }
        if (!masked || fabsf(dlse) < infinity) delta -= dlse;
      }
      statistics[i] = lse == -infinity ? infinity : lse * kLog2E;
      statistics[kQTile + i] = delta;
    }
  }
  const bool copies = __syncthreads_or(non_finite);
  if (threadIdx.x == 0) p.non_finite[blockIdx.x] = copies;
  if (copies) copy_unmasked(p, at);
  auto* sums = reinterpret_cast<float4*>(p.dq_sum + int64_t(blockIdx.x) * (kParts * kPartSums));
  CUTE_UNROLL
  for (int i = threadIdx.x; i < kParts * kPartSums / 4; i += kRowThreads) sums[i] = {0, 0, 0, 0};
}

// dq in 16 bits, by rows: scale times the sums.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90a_fp16_dim64_causal_96x128_cluster2_held_all_5f282b7d_postprocess(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const TileCoord at = q_tile_coord(p, blockIdx.x);
  const int rows = at.sequence.rows(p);
  if (at.row >= rows) return;
  const auto* sums = reinterpret_cast<const float4*>(p.dq_sum + int64_t(blockIdx.x) * (kParts * kPartSums));
  Element* dq = p.dq_rows + at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, at.row);
  CUTE_UNROLL
  for (int i = threadIdx.x; i < kParts * kPieces; i += kRowThreads) {
    const int part = i / kPieces;
    unpack(sums + part * (kPartSums / 4), i - part * kPieces,
           [&](int row, int part_column, const float (&values)[8]) {
      const int column = part * kColumns + part_column;
      if (at.row + row >= rows || column >= p.dim) return;
      Eight eight;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) eight.values[i] = Element(values[i] * p.scale);
      *reinterpret_cast<Eight*>(dq + row * p.dq_seq + column) = eight;
    });
  }
}
