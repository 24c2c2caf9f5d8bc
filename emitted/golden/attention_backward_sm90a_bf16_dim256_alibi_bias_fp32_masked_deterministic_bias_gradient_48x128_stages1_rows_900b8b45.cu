// attention_backward_sm90a_bf16_dim256_alibi_bias_fp32_masked_deterministic_bias_gradient_48x128_stages1_rows_900b8b45
//
// The gradients of o = p v, p = softmax(s) by rows, from do and the forward's lse, where
//   s = scale q k^T
//   p = exp(s - lse)    dp = do v^T    delta = rowsum(do * o) - dlse    ds = p (dp - delta)
//   dv = p^T do         dq = scale ds k         dk = scale ds^T q
//   bf16, head dimension 256, mask none, fixed lengths
//   q tile 48, KV tile 128, 2 consumers, 1 stages, dq added bulk, in order, rows shared
// Digest 900b8b45618c21ceb67bb08d86e8a653836bcaa5e7eb8fb16a9b9221cf949d5e; `warploom show` prints this file.
//
// Three kernels, in the order of launch:
//   preprocess   a CTA of 256 threads per tile of q: delta, lse; zeros dq_sum
//   main         1 cluster of 2 CTAs of 384 threads per KV tile and KV head: dk, dv; adds to dq_sum
//   postprocess  a CTA of 256 threads per tile of q: dq from dq_sum
// Main, 1 CTA per SM; a step is a tile of q and do:
// Warpgroup 0, the producer: thread 0 issues the TMA loads of k, v, q, do and statistics
//   Warps 1 and 2, the writers: add dq of every second step each, by TMA reductions
// Warpgroups 1 and 2, the consumers: scores of 24 rows of q, half of the columns of dk and dv each, by wgmma
// Registers per thread: 168 at launch; setmaxnreg: producer 24, consumers 240 (24 + 2 * 240 <= 3 * 168)
//   A consumer thread has 128 accumulators of dk and dv;
//   in a step 24 of scores and dp, then 24 of dq
// Shared memory: 186368 bytes; the launch asks for 186368 of 232448
//   k               64 rows = 32768
//   v               64 rows = 32768
//   q               1 stage * 24576 = 24576
//   d_o             1 stage * 24576 = 24576
//   ds              1 stage * 12288 = 12288
//   p               2 stages * 6144 = 12288
//   peer_k          half of the columns = 16384
//   sums            dq of one step in fp32 = 24576
//   staging         8 warps * 512 = 4096
//   statistics      1 stage * 640 = 640
//   work, barriers  and padding = 1408
// Barriers         waited for by    guards                            a phase completes after
// k_full, v_full   consumers        k and v until they are loaded     1 arrival and the bytes of TMA
// q_full, do_full  consumers        a stage until it is filled        1 arrival and the bytes of TMA
// q_empty          the producer     q until dk is there               8 arrivals: consumer warps
// do_empty         the producer     do until dv is there              8 arrivals: consumer warps
// peer_full        consumers        ds of the peer CTA                1 arrival and a box of ds
// peer_empty       consumers        ds in the peer until dq is there  8 arrivals of the peer: consumer warps
// sums_full        a writer         dq until it is in shared memory   8 arrivals: consumer warps
// sums_empty       consumers        dq until TMA has read it          1 arrival of a writer
// ticket_full      one thread       the cluster's ticket              1 arrival and 4 bytes
// named 1          all that arrive  ds until it is written            256 threads of consumers
// named 2, 3       all that arrive  dk until it is staged             128 threads of a consumer
// cluster          all that arrive  barriers, and what peers read     all threads of 2 CTAs
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
using Element = cutlass::bfloat16_t;
using BiasElement = float;
constexpr int kDim = 256, kSpan = 128;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kConsumers = 2;  // warpgroups, beside a producer
// Warps of the producer's warpgroup that add dq, after the one that loads: each has that of every second step.
constexpr int kFirstWriter = 1, kWriters = 2;
constexpr int kWgmmaM = 64, kQTile = 48, kKvTile = kWgmmaM * kConsumers;
// Tiles in flight: of q, of do, of ds.
constexpr int kStages = 1, kDoStages = 1, kDsStages = 1;
// Rows of k and v that a CTA has; of q, whose scores a warpgroup computes.
constexpr int kKvRows = 64, kQRows = 24;
// Parts that the columns of dq, dk and dv are divided into; columns of one.
constexpr int kParts = 2, kColumns = kDim / kParts;
constexpr int kScores = kQRows / 2, kGradients = kColumns / 2;  // accumulators of a thread: of p or dp, of dk or dv
// Parts that columns of dq transposed are divided into; columns of one.
constexpr int kQuerySplits = 1, kQueryN = 48;
constexpr int kQueries = kQueryN / 2;  // accumulators of a thread: of dq
constexpr int kPartSums = kQTile * kColumns;  // floats of dq of one q tile, of the columns of one part
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kStatistics = 3;  // of a row of q: lse, delta, what lse lacks in base 2
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
  cute::TmaDescriptor dk_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor dv_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor statistics_map;  // [row, statistics of q tiles], by a q tile
  cute::TmaDescriptor ds_map;  // [column, row, head, batch], by a q tile
  float* lse;  // [batch, heads, seq_q]
  float* dlse;  // the gradient of lse, laid out as it is; may be null
  float* statistics;  // [head, q tile, kStatistics, row]
  float* dq_sum;  // [head, q tile, ...]: dq, as accumulators are laid out
  Element* o_rows;  // o, by the strides below
  Element* do_rows;  // do, by the strides below
  Element* dq_rows;  // dq, by the strides below
  Element* q_rows;  // q, by the strides below
  Element* k_rows;  // k, by the strides below
  int32_t* non_finite;  // [head, q tile]: whether do of a fully masked row is NaN or Inf
  int32_t* turns;  // [head, q tile, part]: kv tiles that added to dq
  int32_t* counter;  // of tickets that blocks of main have taken
  const float* alibi_slopes;  // [batch, heads], by the stride of batches
  const float* bias;  // [batch, head, row, column], by strides
  const uint8_t* shown;  // as bias, by strides
  int64_t o_batch;  // stride of o, in elements
  int64_t o_head;  // stride of o, in elements
  int64_t o_seq;  // stride of o, in elements
  int64_t do_batch;  // stride of do, in elements
  int64_t do_head;  // stride of do, in elements
  int64_t do_seq;  // stride of do, in elements
  int64_t dq_batch;  // stride of dq, in elements
  int64_t dq_head;  // stride of dq, in elements
  int64_t dq_seq;  // stride of dq, in elements
  int64_t q_batch;  // stride of q, in elements
  int64_t q_head;  // stride of q, in elements
  int64_t q_seq;  // stride of q, in elements
  int64_t k_batch;  // stride of k, in elements
  int64_t k_head;  // stride of k, in elements
  int64_t k_seq;  // stride of k, in elements
  int64_t alibi_batch;  // elements
  int64_t bias_batch;  // elements
  int64_t bias_head;  // elements
  int64_t bias_row;  // elements
  int64_t shown_batch;  // elements
  int64_t shown_head;  // elements
  int64_t shown_row;  // elements
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t kv_tiles;  // of one head
  int32_t q_tiles;  // of one head
  int32_t section;  // kv heads whose tiles are processed together
  int32_t all_kv_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t dim;  // of the tensors, at most kDim
  int32_t leftward;  // whether kv tiles add to dq from right to left
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 1536);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, do_map) == 384);
static_assert(OFFSET(Parameters, dq_map) == 512 && OFFSET(Parameters, dk_map) == 640);
static_assert(OFFSET(Parameters, dv_map) == 768 && OFFSET(Parameters, statistics_map) == 896);
static_assert(OFFSET(Parameters, ds_map) == 1024 && OFFSET(Parameters, lse) == 1152);
static_assert(OFFSET(Parameters, dlse) == 1160 && OFFSET(Parameters, statistics) == 1168);
static_assert(OFFSET(Parameters, dq_sum) == 1176 && OFFSET(Parameters, o_rows) == 1184);
static_assert(OFFSET(Parameters, do_rows) == 1192 && OFFSET(Parameters, dq_rows) == 1200);
static_assert(OFFSET(Parameters, q_rows) == 1208 && OFFSET(Parameters, k_rows) == 1216);
static_assert(OFFSET(Parameters, non_finite) == 1224 && OFFSET(Parameters, turns) == 1232);
static_assert(OFFSET(Parameters, counter) == 1240 && OFFSET(Parameters, alibi_slopes) == 1248);
static_assert(OFFSET(Parameters, bias) == 1256 && OFFSET(Parameters, shown) == 1264);
static_assert(OFFSET(Parameters, o_batch) == 1272 && OFFSET(Parameters, o_head) == 1280);
static_assert(OFFSET(Parameters, o_seq) == 1288 && OFFSET(Parameters, do_batch) == 1296);
static_assert(OFFSET(Parameters, do_head) == 1304 && OFFSET(Parameters, do_seq) == 1312);
static_assert(OFFSET(Parameters, dq_batch) == 1320 && OFFSET(Parameters, dq_head) == 1328);
static_assert(OFFSET(Parameters, dq_seq) == 1336 && OFFSET(Parameters, q_batch) == 1344);
static_assert(OFFSET(Parameters, q_head) == 1352 && OFFSET(Parameters, q_seq) == 1360);
static_assert(OFFSET(Parameters, k_batch) == 1368 && OFFSET(Parameters, k_head) == 1376);
static_assert(OFFSET(Parameters, k_seq) == 1384 && OFFSET(Parameters, alibi_batch) == 1392);
static_assert(OFFSET(Parameters, bias_batch) == 1400 && OFFSET(Parameters, bias_head) == 1408);
static_assert(OFFSET(Parameters, bias_row) == 1416 && OFFSET(Parameters, shown_batch) == 1424);
static_assert(OFFSET(Parameters, shown_head) == 1432 && OFFSET(Parameters, shown_row) == 1440);
static_assert(OFFSET(Parameters, heads) == 1448 && OFFSET(Parameters, seq_q) == 1452);
static_assert(OFFSET(Parameters, seq_k) == 1456 && OFFSET(Parameters, kv_tiles) == 1460);
static_assert(OFFSET(Parameters, q_tiles) == 1464 && OFFSET(Parameters, section) == 1468);
static_assert(OFFSET(Parameters, all_kv_heads) == 1472 && OFFSET(Parameters, sharing) == 1476);
static_assert(OFFSET(Parameters, dim) == 1480 && OFFSET(Parameters, leftward) == 1484);
static_assert(OFFSET(Parameters, scale) == 1488);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 24] += A[64 x 16] * B[16 x 24]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[12], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 128] += A[64 x 16] * B[16 x 128]; A and B by descriptor, D in registers.
struct KeyWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[64], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 48] += A[64 x 16] * B[16 x 48]; A and B by descriptor, D in registers.
struct QueryWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[24], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
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
  // Where all batches have one bias they come one after the other, while L2 has it.
  const bool shared = p.bias_batch == 0;
  const int kv_heads = p.heads / p.sharing, inner = shared ? p.all_kv_heads / kv_heads : kv_heads;
  const int outer = all_kv_head / inner, rest = all_kv_head - outer * inner;
  const int batch = shared ? rest : outer, head = shared ? outer : rest;
  return { {batch}, head, tile * kKvTile, (batch * kv_heads + head) * p.sharing * p.q_tiles};
}

// Where the q tile with that number is.
__device__ __forceinline__ TileCoord q_tile_coord(const Parameters& p, int number) {
  const int all_head = number / p.q_tiles, batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (number - all_head * p.q_tiles) * kQTile};
}

// Where a row of k begins that rows of q at a place attend to.
__device__ __forceinline__ int64_t key_at(const Parameters& p, const TileCoord& at, int column) {
  return at.sequence.batch * p.k_batch + at.head / p.sharing * p.k_head + column * p.k_seq;
}

// Starts the store of a box; rows past the end of the sequence are left out.
__device__ __forceinline__ void store_box(const cute::TmaDescriptor& map, const uint8_t* box, int column,
                                          BoxCoord coord, int head) {
  cute::SM90_TMA_STORE_4D::copy(&map, box, column, coord.row, head, coord.batch);
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
// A score is multiplied by `factor`, and gets its bias in one rounding to fp32, before anything else: a row
// that a large finite bias hides then has the scores that torch's has, all alike, whose weights are alike too.
struct Scaling {
  static constexpr float exponent = kLog2E;  // the factor of a biased score in the argument of exp2
  float factor;                              // of a score before the bias is added

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : factor(p.scale) {}
};

constexpr uint32_t kHidden = 0xff800000;  // the score of what does not attend: -inf

constexpr int kStagedRows = kQRows, kStagedColumns = 16;  // of a warp
// Where accumulator i is, from the thread's first row of q and column.
__device__ constexpr int row_of(int i) { return i / 4 * 8 + i % 2; }
__device__ constexpr int column_of(int i) { return i / 2 % 2 * 8; }

// What is added to scores, or hides them, before the softmax: a Score for a tile of a head.
//
// A bias of 16 bits and a mask come by shared memory: stage() begins to copy what a warp has of a tile,
// kStagedRows rows of kStagedColumns, while it works on the tile before; await() waits for them. A warp stages
// for itself alone: no other waits for it.
// Without a branch: MMAs are in flight around loads.
__device__ __forceinline__ uint32_t load(const float* at, bool there) {
  uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
      : "=r"(x) : "l"(at), "r"(int(there)));
  return x;
}
// What a warp stages of elements of kBytes: rows by pieces of 16 bytes. No two of 8 rows begin in the same
// banks.
template <int kBytes> struct Staged {
  static constexpr int kPieces = kStagedColumns * kBytes / 16, kPitch = (kPieces | 1) * 16;
  static constexpr int kRows = (kStagedRows + 15) / 16 * 16;  // what ldmatrix names; the last 8 may be of nobody
  // Lanes side by side, and rows that all of them copy at a time.
  static constexpr int kLanes = kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  static constexpr int kRowsAtATime = 32 / kLanes;
  uint8_t bytes[kRows * kPitch];

  // Begins to copy from the warp's first row and column, of which there are `rows` and `columns`; the rest is
  // zeros.
  __device__ __forceinline__ void copy(const void* from, int64_t pitch, int rows, int columns) {
    const int row = threadIdx.x % 32 / kLanes, piece = threadIdx.x % kLanes;
    const uint32_t to = cute::cast_smem_ptr_to_uint(bytes) + row * kPitch + piece * 16;
    CUTE_UNROLL
    for (int p = 0; p < kPieces; p += kLanes) {
      if (kPieces % kLanes != 0 && p + piece >= kPieces) continue;
      const auto* at = static_cast<const uint8_t*>(from) + (p + piece) * 16 + row * pitch * kBytes;
      const int left = max(0, min(16, columns * kBytes - (p + piece) * 16));
      CUTE_UNROLL
      for (int r = 0; r < kStagedRows; r += kRowsAtATime, at += kRowsAtATime * kBytes * pitch) {
        if (kStagedRows % kRowsAtATime != 0 && row + r >= kStagedRows) continue;
        // By L1, in which the one row of a mask of columns stays: all CTAs ask for it.
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to + r * kPitch + p * 16), "l"(at), "r"(row + r < rows ? left : 0)
                     : "memory");
      }
    }
  }

  // Bytes of accumulators i to i + 7, each in bits that are its own: 0 or not.
  __device__ __forceinline__ void read_bytes(uint32_t (&x)[8], int i) const {
    const int lane = threadIdx.x % 32;
    const uint8_t* first = bytes + lane % 4 * 2 * kPitch + lane / 4;
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j)
      x[j] = kScores > i + j ? first[row_of(i + j) * kPitch + column_of(i + j)] : 0;
  }
};
struct Staging {
  alignas(16) Staged<1> shown;
};

struct Score {
  float slope;     // of the head, times -unit; where scores lean(), times the sign of distances
  float distance;  // from the thread's first column to where its first row stands
  int rows, columns;  // that are left of the sequence, from the thread's first on
  const float* bias;  // at the thread's first row and column
  int64_t bias_row;
  const Staging& staging;
  struct Eight {
    uint32_t bias[8], shown[8];
  };

  // `row` and `column` are the thread's first in the sequence, of `head`.
  __device__ __forceinline__ Score(const Parameters& p, const Staging& staging, const Sequence& sequence,
                                   int head, int row, int column)
      : staging(staging)
  {
    slope = -p.alibi_slopes[number_of(sequence) * p.alibi_batch + head];
    distance = row + sequence.columns(p) - sequence.rows(p) - column;
    rows = sequence.rows(p) - row;
    columns = sequence.columns(p) - column;
    bias = p.bias + number_of(sequence) * p.bias_batch + head * p.bias_head + row * p.bias_row + column;
    bias_row = p.bias_row;
  }

  __device__ __forceinline__ static int64_t number_of(const Sequence& sequence) {
    return sequence.batch;
  }

  // `row` and `column` are the warp's first of the tile.
  __device__ __forceinline__ static void stage(const Parameters& p, Staging& staging, const Sequence& sequence,
                                               int head, int row, int column) {
    const int rows = sequence.rows(p) - row, columns = sequence.columns(p) - column;
    staging.shown.copy(
        p.shown + number_of(sequence) * p.shown_batch + head * p.shown_head + row * p.shown_row + column,
        p.shown_row, rows, columns);
  }
  __device__ __forceinline__ static void await() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

  // What is read for accumulators i to i + 7; 0 where the sequence ends.
  __device__ __forceinline__ Eight read(int i) const {
    Eight eight;
    CUTE_UNROLL
    for (int j = i; j < min(i + 8, kScores); ++j)
      eight.bias[j - i] = load(bias + row_of(j) * bias_row + column_of(j),
                               row_of(j) < rows && column_of(j) < columns);
    staging.shown.read_bytes(eight.shown, i);
    return eight;
  }

  // What is added to the score of accumulator i.
  __device__ __forceinline__ float term(int i, const Eight& eight) const {
    const float bias = __uint_as_float(eight.bias[i % 8]);
    return fmaf(slope, fabsf(distance + (row_of(i) - column_of(i))), bias);
  }

  __device__ __forceinline__ bool hides(int i, const Eight& eight) const { return eight.shown[i % 8] == 0; }
};

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
  alignas(1024) uint8_t p[2][kDsBoxBytes];  // laid as ds is, of the CTA's own rows of k
  alignas(1024) uint8_t peer_k[kKvBytes / kParts];  // the peer's rows, of the columns of dq that this CTA adds
  alignas(128) float4 sums[kConsumers * 4][kQueries / 4][32];  // dq on its way out, by warps
  Staging staging[4 * kConsumers];  // of each warp
  struct alignas(128) { float rows[kStatistics][kQTile]; } statistics[kStages];  // guarded by q's barriers
  FullBarrier k_full, v_full, q_full[kStages], do_full[kDoStages];  // TMA's bytes have arrived
  EmptyBarrier q_empty[kStages], do_empty[kDoStages];               // every reader is done with them
  FullBarrier peer_full;    // the peer's box of ds has arrived
  EmptyBarrier peer_empty;  // the peer has multiplied dq with the box that was sent to it
  Work work;  // where registers are too few for it
  EmptyBarrier sums_full[kWriters], sums_empty;  // the step's dq is laid down for its writer; TMA has read it
  FullBarrier ticket_full;  // the ticket that the cluster's first CTA has taken is here
  int ticket;
};
static_assert(sizeof(SharedStorage) <= 186368);

// The tile called `index`, in the order in which tiles are processed: by sections of heads whose q, do
// and dq fit L2 together; within one the first tiles of all its heads, then the next: where columns right
// of the diagonal are hidden the first are the longest.
__device__ __forceinline__ Work locate(const Parameters& p, int index) {
  const int part = index % kParts;
  index /= kParts;
  const int section = index / (p.section * p.kv_tiles), offset = index - section * p.section * p.kv_tiles;
  const int heads = min(p.section, p.all_kv_heads - section * p.section);
  const int tile_index = offset / heads, all_head = section * p.section + offset - tile_index * heads;
  const int tile = p.leftward ? p.kv_tiles - 1 - tile_index : tile_index;
  const KvTileCoord at = kv_tile_coord(p, tile, all_head);
  const int end = at.sequence.rows(p);
  constexpr int begin = 0;
  // A CTA has nothing to do where no row attends to its tile.
  const bool any = begin < end;
  return {at.sequence, at.head, at.column, part, begin / kQTile, any ? (end + kQTile - 1) / kQTile : 0,
          at.first_tile};
}

// The index of the CTA's work: a cluster takes one ticket when it begins. Its first CTA does, and tells the
// others; one thread of each asks. Where CTAs share rows each is an index of its own.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage& shared) {
  constexpr int kBlocks = 2;
  const int block = blockIdx.x % kBlocks;
  int ticket;
  if (block > 0) {
    shared.ticket_full.arrive_and_expect_tx(sizeof(shared.ticket));
    shared.ticket_full.wait(0);
    ticket = *const_cast<volatile int*>(&shared.ticket);
  } else {
    ticket = atomicAdd(p.counter, 1);
    CUTE_UNROLL
    for (int other = 1; other < kBlocks; ++other)
      asm volatile("{\n.reg .b32 place, full;\nmapa.shared::cluster.u32 place, %0, %3;\n"
                   "mapa.shared::cluster.u32 full, %1, %3;\n"
                   "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %2, [full];\n}"
                   ::"r"(cute::cast_smem_ptr_to_uint(&shared.ticket)),
                   "r"(cute::cast_smem_ptr_to_uint(&shared.ticket_full)), "r"(ticket), "r"(other)
                   : "memory");
  }
  return ticket * kBlocks + block;
}

// To the dq of a q tile KV tiles add from left to right, the longest of a causal mask first, or leftward. CTAs
// wait for CTAs with lower numbers only, and take numbers when they begin: so none waits for one that may never
// begin.

// The q tile in place n of [begin, end): from the last on, with which KV tiles further left begin as well;
// leftward from a KV tile's first on, which those further right that see it begin before.
__device__ __forceinline__ int walk(const Parameters& p, const Work& work, int n) {
  return p.leftward ? n : work.begin + work.end - 1 - n;
}

// How many KV tiles add to the dq of the q tile that begins with `row` before the CTA's own.
__device__ __forceinline__ int tiles_before(const Parameters& p, const Work& work, int row) {
  const Sequence& sequence = work.sequence;
  const int own = work.column / kKvTile, columns = sequence.columns(p);
  if (p.leftward) {  // from the last column that one of the tile's rows attends to
    return (columns - 1) / kKvTile - own;
  }
  return own;
}

// ---- Producer: one thread keeps q and do coming --------------------------------------------------
// Starts the load of v, and of the peer's rows of k for dq: of the columns that the CTA adds.
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, const Work& work,
                                            BoxCoord columns) {
  shared.v_full.arrive_and_expect_tx(kKvBytes + kKvBytes / kParts);
  Tile<kKvRows>::load(p.v_map, shared.v_full, kEvictFirst, shared.v, columns, work.head);
  const BoxCoord peer = work.sequence.columns_at<kKvRows>(work.column + (1 - work.part) * kKvRows);
  CUTE_NO_UNROLL
  for (int box = 0; box < kBoxes / kParts; ++box)
    load_box(p.k_map, shared.v_full, kEvictFirst, shared.peer_k + box * Tile<kKvRows>::kBoxBytes,
             work.part * kColumns + box * kBoxColumns, peer, work.head);
}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, const Work& work) {
  if (work.begin >= work.end) return;
  const int column = work.column + work.part * kKvRows;
  const BoxCoord columns = work.sequence.columns_at<kKvRows>(column);
  shared.k_full.arrive_and_expect_tx(kKvBytes);
  Tile<kKvRows>::load(p.k_map, shared.k_full, kEvictFirst, shared.k, columns, work.head);
  Position position{0, 1};  // a new barrier has completed the phase of parity 1: the first waits return
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i) {
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
      if (i == 0 && n == work.begin) load_values(p, shared, work, columns);
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
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
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
// Issues the MMA over a CTA's rows of k; with kMore it is added to the one that was issued before.
template <bool kMore = false>
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer % kQuerySplits * kQueryN * 128 / 16;
  k += consumer / kQuerySplits * (kWgmmaM / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  if (!kMore) fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(k + step * QueryWgmma::kK * kSpan / 16, ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16,
                    dq, kMore || step > 0);
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

// Whether columns [column, column + 64) reach beyond the sequence.
__device__ __forceinline__ bool partial(const Parameters& p, const Sequence& sequence, int column) {
  return column + kWgmmaM > sequence.columns(p);
}

// Hides what does not attend. wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, which are
// columns of the scores, and of every 8 columns, rows of q, 2 (l % 4) and the next.
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, const Sequence& sequence,
                                     int column) {
  column += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r, column += 8) {
    const int end = column >= sequence.columns(p) ? 0 : kQRows;
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int offset = i / 2 * 8 + i % 2;
      if (offset >= end) scores[i / 2 * 4 + 2 * r + i % 2] = __uint_as_float(kHidden);
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
  int head;  // of q
  int next_row, next_head;  // of the step after, -1: there is none
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
    return shared.ds[0][box];
  }
  __device__ __forceinline__ uint64_t staged_ds(Step step) const {
    return ds;
  }
};

__device__ __forceinline__ Staging& staging_of(const Consumer& c) {
  return c.shared.staging[c.consumer * 4 + threadIdx.x / 32 % 4];
}
// Begins to copy what changes the scores of a q tile.
__device__ __forceinline__ void begin_staging(const Consumer& c, int row, int head) {
  Score::stage(c.p, staging_of(c), c.work.sequence, head, row + c.row, c.column + threadIdx.x / 32 % 4 * 16);
}
// Begins to copy what changes those of the step after, when all warps have read this one's: after meet(), where
// the fewest registers are in use.
__device__ __forceinline__ void begin_staging_ahead(const Consumer& c, Step step) {
  if (step.next_row >= 0) begin_staging(c, step.next_row, step.next_head);
}
// What is added to the scores of a step.
__device__ __forceinline__ Score score_of(const Consumer& c, Step step) {
  const int column = c.column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  return Score(c.p, staging_of(c), c.work.sequence, step.head, step.row + c.row + threadIdx.x % 4 * 2,
               column);
}

// The number whose exponential the forward pass took, of a score and what is added to it.
__device__ __forceinline__ float biased(const Consumer& c, float x, float term) {
  return fmaf(x, c.scaling.factor, term);
}

// A score less its row's lse, which is at least as large as any. Where both are large a score may be one step
// of fp32 above what the forward pass had; NaN stays.
__device__ __forceinline__ float below(float lse, float score) {
  float difference;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(difference) : "f"(score - lse));
  return difference;
}

// p = exp(s - lse) over what these sum to; lse is inf for a fully masked row. s becomes p.
__device__ __forceinline__ void weigh(const Consumer& c, Weights& weights, float (&scores)[kScores], Step step,
                                      Position at) {
  if (partial(c.p, c.work.sequence, c.column)) mask(scores, c.p, c.work.sequence, c.column);
  const Score score = score_of(c, step);
  Score::Eight eight{};
  Score::await();
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 lse = statistics(c.shared.statistics[at.stage].rows[0] + c.row, i);
    const float2 correction = statistics(c.shared.statistics[at.stage].rows[2] + c.row, i);
    if (i % 2 == 0) eight = score.read(4 * i);
    CUTE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      float &x = scores[4 * i + j], &y = scores[4 * i + j + 1];
      if (score.hides(4 * i + j, eight)) x = __uint_as_float(kHidden);
      if (score.hides(4 * i + j + 1, eight)) y = __uint_as_float(kHidden);
      const float low_score = biased(c, x, score.term(4 * i + j, eight));
      const float high_score = biased(c, y, score.term(4 * i + j + 1, eight));
      const float low = fast_exp2(fmaf(below(lse.x, low_score), c.scaling.exponent, -correction.x));
      const float high = fast_exp2(fmaf(below(lse.y, high_score), c.scaling.exponent, -correction.y));
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
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };"
               ::"r"(address + kPairs * 16 * 128), "r"(weights[kPairs][0]), "r"(weights[kPairs][1])
               : "memory");
  cutlass::arch::fence_view_async_shared();  // make the writes visible to wgmma before meet() lets it read
}

// Where the consumers meet: in a step, when all of ds is written; at the end, when all have multiplied.
__device__ __forceinline__ void meet() { cutlass::arch::NamedBarrier::sync(kConsumers * 128, 1); }

// The gradients of scores leave as ds lies in shared memory, when all have written it: one thread of the
// warpgroup that has a box stores it, and waits until it is read before anybody writes there again.
__device__ __forceinline__ bool stores_ds(const Consumer& c) {
  return threadIdx.x % 128 == 0 && c.consumer == 0;
}
__device__ __forceinline__ void store_ds(const Consumer& c, Step step) {
  if (!stores_ds(c)) return;
  const int batch = c.work.sequence.batch;
  cute::SM90_TMA_STORE_4D::copy(&c.p.ds_map, c.own_ds(step), c.column, step.row, step.head, batch);
  cute::tma_store_arrive();
}
__device__ __forceinline__ void await_stored_ds(const Consumer& c) {
  if (stores_ds(c)) cute::tma_store_wait<0>();
}

// The two CTAs of a pair exchange ds. A CTA writes its 64 columns to its own box of ds, when the copy
// before has arrived: the peer says so with `peer_empty`, when it has multiplied dq with it. When all is
// written one thread copies the box to the same place in the peer's memory, and the bytes come to the peer's
// `peer_full`. Both CTAs go through the same q tiles, those that see any of the pair's 128 rows of k, even
// if one CTA's rows are all past the end of the sequence: its ds is 0, but nobody waits in vain.
//
// Issues gradient += weights rows, where `weights` is a box. dv += p^T do, dk += ds^T q.
__device__ __forceinline__ void multiply_gradient(float (&gradient)[kGradients], uint64_t weights,
                                                  uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / KeyWgmma::kK; ++step)
    KeyWgmma::fma(weights + step * KeyWgmma::kK * 128 / 16, rows + step * KeyWgmma::kK * kSpan / 16, gradient, true);
  cute::warpgroup_commit_batch();
}

// The CTA's own box of ds.
__device__ __forceinline__ uint64_t own_ds(const Consumer& c, Step step) {
  return c.staged_ds(step) + c.box * kDsBoxBytes / 16;
}

// Waits until the peer has the box of the step before, and has done with it. The CTA's own warpgroups have
// as well: they have come to meet() since, with p.
__device__ __forceinline__ void await_ds(const Consumer& c, Step step) {
  c.shared.peer_empty.wait(step.parity ^ 1);
}

// p's stage, which others may still read in the step after, but not in the one after that: all have come to
// meet() with that one's p.
__device__ __forceinline__ const uint8_t* own_p(const Consumer& c, Step step) { return c.shared.p[step.parity]; }
__device__ __forceinline__ uint64_t staged_p(const Consumer& c, Step step) {
  return matrix(own_p(c, step), kDsBoxBytes, 8 * 128, 1);
}

// Sends the peer the CTA's box of ds, when all have written it, and expects the peer's.
__device__ __forceinline__ void exchange(const Consumer& c, Step step) {
  if (threadIdx.x != 128) return;  // the consumers' first
  c.shared.peer_full.arrive_and_expect_tx(kDsBoxBytes);
  asm volatile("{\n.reg .b32 box, full;\nmapa.shared::cluster.u32 box, %0, %3;\n"
               "mapa.shared::cluster.u32 full, %1, %3;\n"
               "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [box], [%0], %2, [full];\n}"
               ::"r"(cute::cast_smem_ptr_to_uint(c.own_ds(step))),
               "r"(cute::cast_smem_ptr_to_uint(&c.shared.peer_full)), "n"(kDsBoxBytes), "r"(1 - c.part)
               : "memory");
}

// Issues dq's MMAs over the CTA's own rows of k, then adds those over the peer's, when its ds is there.
__device__ __forceinline__ void multiply_own_query(const Consumer& c, float (&dq)[kQueries], Step step) {
  multiply_query(dq, own_ds(c, step), c.k + c.columns<kKvRows>(c.part), c.consumer);
}
__device__ __forceinline__ void multiply_peer_query(const Consumer& c, float (&dq)[kQueries], Step step) {
  const uint64_t peer_k = matrix(c.shared.peer_k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 1);
  c.shared.peer_full.wait(step.parity);
  multiply_query<true>(dq, c.staged_ds(step) + (1 - c.box) * kDsBoxBytes / 16, peer_k, c.consumer);
}

// Tells the peer that dq has been multiplied with the box that it sent.
__device__ __forceinline__ void release_ds(const Consumer& c) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) c.shared.peer_empty.arrive(1 - c.part);
}

// dq leaves through two writers, warps beside the producer's: each has every second step's. What the consumers
// lay down one writer adds to the sums of its q tile, all at once, and releases the staging as soon as TMA has
// read it. It waits for its turn at the tile first, and passes the turn on when all is added; meanwhile the
// other writer has the next step's. A CTA only ever waits for those with lower numbers.
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

__device__ __forceinline__ void wait_semaphore(const int* semaphore, int count) {
  int passed;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(passed) : "l"(semaphore) : "memory");
  while (passed < count);  // more, where packed offsets decrease and sequences share storage
  asm volatile("fence.proxy.async.global;" ::: "memory");  // what is added now comes after what was waited for
}
__device__ __forceinline__ void release_semaphore(int* semaphore) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // all is added, not just read
  asm volatile("fence.proxy.async.global;\nfence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], 1;"
               ::"l"(semaphore) : "memory");
}

// Adds what every second step lays down, the steps whose parity is `writer`.
__device__ __forceinline__ void add(const Parameters& p, SharedStorage& shared, const Work& work,
                                    uint32_t writer) {
  uint32_t parity = 0, phase = 0;
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i) {
    CUTE_NO_UNROLL
    for (int n = work.begin; n < work.end; ++n, parity ^= 1) {
      if (parity != writer) continue;
      const int m = walk(p, work, n), sum_index = (work.first_tile + i * p.q_tiles + m) * kParts + work.part;
      wait_semaphore(p.turns + sum_index, tiles_before(p, work, m * kQTile));
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
      release_semaphore(p.turns + sum_index);
    }
  }
}

// The steps of a consumer of a pair, one for each q tile: one after the other, so that a stage of q may be the
// only one. Within a step dp is multiplied while p is computed, dv while ds is, the CTA's own half of dq
// while the peer's ds is on its way, and dk while dq leaves.
struct Steps {
  __device__ __forceinline__ void begin(const Consumer& c, Position) { c.shared.v_full.wait(0); }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kGradients], Step step,
                                       Position at) {
    const int half = c.row * kSpan / 16;  // of the q tile, in a descriptor
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights;  // p^T, then ds^T
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k, c.staged_q(at) + half);
    c.shared.do_full[at.stage].wait(at.phase);
    multiply_scores(dp, c.v, c.staged_do(at) + half);
    cute::warpgroup_wait<1>();  // the scores are there; dp's MMAs run on
    fence(scores);
    weigh(c, weights, scores, step, at);
    write(c, own_p(c, step), weights);
    meet();
    multiply_gradient(dv, staged_p(c, step), c.staged_do(at) + c.columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dp is there; dv's MMAs run on
    fence(dp);
    differentiate(c, dp, scores, at);
    pack(weights, dp);
    await_ds(c, step);
    write(c, c.own_ds(step), weights);
    meet();
    store_ds(c, step);
    begin_staging_ahead(c, step);
    exchange(c, step);
    multiply_own_query(c, dq, step);
    multiply_peer_query(c, dq, step);
    multiply_gradient(dk, own_ds(c, step), c.staged_q(at) + c.columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dv and dq are there; dk's MMAs run on
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[at.stage]);
    await_stored_ds(c);
    release_ds(c);
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }

  // The peer reads the last box of ds, and says that it has: after that nobody touches the CTA's memory.
  __device__ __forceinline__ void end(const Consumer& c, int count) { await_ds(c, {0, 0, count % 2u}); }
};

// Writes scale * gradient to the warpgroup's 64 rows of a KV tile, 16 columns of a warp's 16 rows at a
// time; TMA's swizzle XORs the 16-byte column of a row with bits of the row number.
__device__ __forceinline__ void stage(uint8_t* rows, const float (&gradient)[kGradients], float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 16; ++i) {
    const float* x = gradient + i * 8;
    const int offset = row * kSpan + i * 32 % kSpan + lane / 16 * 16;
    const uint32_t address = cute::cast_smem_ptr_to_uint(rows) + i * 32 / kSpan * Tile<kKvRows>::kBoxBytes +
                             (offset ^ ((offset >> 3) & (kSpan - 16)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(address),
                 "r"(pair(x[0] * scale, x[1] * scale)), "r"(pair(x[2] * scale, x[3] * scale)),
                 "r"(pair(x[4] * scale, x[5] * scale)), "r"(pair(x[6] * scale, x[7] * scale))
                 : "memory");
  }
}

// Starts the stores of the warpgroup's part of a gradient's columns, of its 64 rows.
__device__ __forceinline__ void store(const cute::TmaDescriptor& map, const uint8_t* rows, const Consumer& c) {
  const BoxCoord coord = c.work.sequence.columns_at<kWgmmaM>(c.column);
  for (int box = 0; box < kBoxes / kParts; ++box)
    store_box(map, rows + box * Tile<kKvRows>::kBoxBytes, c.consumer * kColumns + box * kBoxColumns, coord,
              c.work.head);
  cute::tma_store_arrive();
}

// The gradients leave through the memory of v and k, each warpgroup's through the boxes of its columns: all have the same rows.
__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[kGradients]) {
  const int own = 16 * c.columns<kKvRows>(c.consumer);
  meet();  // the other warpgroup reads the same rows of v
  stage(c.shared.v + own, dv, 1);
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier releases its thread
  meet();  // nobody reads k any more, either
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) store(c.p.dv_map, c.shared.v + own, c);
  stage(c.shared.k + own, dk, c.p.scale);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, 2 + c.consumer);
  if (leads) store(c.p.dk_map, c.shared.k + own, c);
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
}

// ---- Mainloop -----------------------------------------------------------------------------------------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, const Work& work, int consumer) {
  const int part = __shfl_sync(~0u, work.part, 0);  // the shuffle makes it warp-uniform
  const int box = part, row = consumer * kQRows;
  constexpr int own = 0;
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
    const int count = (work.end - work.begin) * p.sharing;
    begin_staging(c, walk(p, work, work.begin) * kQTile, work.head * p.sharing);
    shared.k_full.wait(0);
    steps.begin(c, position);  // waits for v, too
    int n = work.begin, tile = work.first_tile;  // of the head's first q tile
    int head = work.head * p.sharing;
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const int m = walk(p, work, n);
      Step step{m * kQTile, tile + m, i % 2u, head};
      if (++n == work.end) {  // on to the next head
        n = work.begin;
        tile += p.q_tiles;
        head += 1;
      }
      step.next_row = i + 1 < count ? walk(p, work, n) * kQTile : -1;
      step.next_head = head;
      steps.next(c, dk, dv, step, position);
      position.advance();
    }
    steps.end(c, count);
  }
  store_gradients(c, dk, dv);
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_backward_sm90a_bf16_dim256_alibi_bias_fp32_masked_deterministic_bias_gradient_48x128_stages1_rows_900b8b45(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q_map, &p.k_map, &p.v_map, &p.do_map, &p.statistics_map, &p.dk_map, &p.dv_map, &p.ds_map})
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
    shared.peer_full.init(1);
    shared.peer_empty.init(4 * kConsumers);
    shared.ticket_full.init(1);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) shared.work = locate(p, number(p, shared));
  __syncthreads();
  const Work& work = shared.work;
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
constexpr int kRowThreads = 256, kRowLanes = 32;

struct alignas(16) Eight {
  Element values[8];
};

// ---- Rows whose log-sum-exp is too coarse ------------------------------------------------------------
// A bias of, say, -1e9 over a whole row makes its lse -1e9 too, an fp32 number whose neighbours are 64 away:
// the log of how many columns share the row is lost in it. From this size on the sum of exp(score - lse) is
// computed again.
constexpr float kCoarse = 4096;
// A warp has 16 rows, and where there are more warps than such groups a share of the columns.
constexpr int kRowWarps = kRowThreads / 32, kGroups = kQTile / 16;
constexpr int kShares = kGroups < kRowWarps ? kRowWarps / kGroups : 1;

// Of a warp, 16 rows by 16 by 8 columns (PTX ISA, mma.m16n8k16): lane l has, of a, rows l / 4 and 8 below and
// of each columns 2 (l % 4) and the next, and 8 to the right; of b, the same columns' rows of column l / 4; of
// d, rows as of a and columns 2 (l % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
      "{ %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

// Adds exp(score - lse) of a lane's two rows of 16 (l / 4, and 8 below) over its share of the columns. Rows
// that do not exist have an lse of 0; nobody reads what is summed of them.
__device__ __forceinline__ void sum_weights(const Parameters& p, const TileCoord& at, int first_row, int share,
                                            const float (&lse)[2], float (&sums)[2]) {
  const Sequence& sequence = at.sequence;
  const int columns = sequence.columns(p), rows = sequence.rows(p), lane = threadIdx.x % 32,
            pair = lane % 4 * 2;
  const int64_t number = Score::number_of(sequence);
  const int row[2] = {min(first_row + lane / 4, rows - 1), min(first_row + lane / 4 + 8, rows - 1)};
  const Element* q[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) q[r] = p.q_rows + sequence.row_at(p.q_batch, p.q_head, p.q_seq, at.head, row[r]) + pair;
  const Scaling scaling(p);
  const float slope = -p.alibi_slopes[number * p.alibi_batch + at.head];
  CUTE_NO_UNROLL
  for (int first = share * 8; first < columns; first += kShares * 8) {
    const Element* k = p.k_rows + key_at(p, at, min(first + lane / 4, columns - 1)) + pair;
    float scores[4] = {0, 0, 0, 0};
#pragma unroll 2  // loads of several steps are on their way at a time
    for (int i = 0; i < p.dim; i += 16) {
      const bool more = i + 8 < p.dim;  // of 8 columns after these
      const auto two = [](const Element* at) { return *reinterpret_cast<const uint32_t*>(at); };
      const uint32_t rows_of_q[4] = {two(q[0] + i), two(q[1] + i), more ? two(q[0] + i + 8) : 0,
                                     more ? two(q[1] + i + 8) : 0};
      multiply(scores, rows_of_q, two(k + i), more ? two(k + i + 8) : 0);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, column = first + pair + i % 2;
      if (column >= columns) continue;
      if (p.shown[number * p.shown_batch + at.head * p.shown_head + row[r] * p.shown_row + column] == 0) continue;
      const float bias = p.bias[number * p.bias_batch + at.head * p.bias_head + row[r] * p.bias_row + column];
      const float term = fmaf(slope, fabsf(float(row[r] + columns - rows - column)), bias);
      sums[r] += fast_exp2(below(lse[r], fmaf(scores[i], scaling.factor, term)) * scaling.exponent);
    }
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
    sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
  }
}

// log2 of these sums for the rows of a q tile, by all threads of a CTA: 0 where lse is exact enough.
__device__ __forceinline__ void find_corrections(const Parameters& p, const TileCoord& at,
                                                 float (&corrections)[kQTile]) {
  __shared__ float sums_of_shares[kShares][kQTile];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = at.sequence.rows(p) - at.row;
  const auto lse_of = [&](int i) { return i < rows ? p.lse[at.sequence.lse_at(p, at.head, at.row + i)] : 0; };
  const auto is_coarse = [](float lse) { return fabsf(lse) >= kCoarse && fabsf(lse) < __int_as_float(0x7f800000); };
  CUTE_NO_UNROLL
  for (int group = warp / kShares; group < kGroups; group += kRowWarps / kShares) {
    const int first = group * 16, share = warp % kShares;
    const float lse[2] = {lse_of(first + lane / 4), lse_of(first + lane / 4 + 8)};
    float sums[2] = {0, 0};
    if (__any_sync(~0u, is_coarse(lse[0]) || is_coarse(lse[1])))
      sum_weights(p, at, at.row + first, share, lse, sums);
    if (lane % 4 == 0) {
      sums_of_shares[share][first + lane / 4] = sums[0];
      sums_of_shares[share][first + lane / 4 + 8] = sums[1];
    }
  }
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < kQTile; i += kRowThreads) {
    const float lse = lse_of(i);
    float sum = 0;
    CUTE_UNROLL
    for (int share = 0; share < kShares; ++share) sum += sums_of_shares[share][i];
    corrections[i] = is_coarse(lse) ? log2f(sum) : 0;
  }
  __syncthreads();
}

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

// delta = rowsum(do * o) - dlse and lse, for main to read; zeros where main adds dq.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90a_bf16_dim256_alibi_bias_fp32_masked_deterministic_bias_gradient_48x128_stages1_rows_900b8b45_preprocess(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
  if (threadIdx.x < kParts) p.turns[int64_t(blockIdx.x) * kParts + threadIdx.x] = 0;
  const TileCoord at = q_tile_coord(p, blockIdx.x);
  const int rows = at.sequence.rows(p);
  if (at.row >= rows) return;
  __shared__ float corrections[kQTile];
  find_corrections(p, at, corrections);
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
      statistics[i] = lse == -infinity ? infinity : lse;
      statistics[2 * kQTile + i] = corrections[i];
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
    attention_backward_sm90a_bf16_dim256_alibi_bias_fp32_masked_deterministic_bias_gradient_48x128_stages1_rows_900b8b45_postprocess(const __grid_constant__ Parameters p) {
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
