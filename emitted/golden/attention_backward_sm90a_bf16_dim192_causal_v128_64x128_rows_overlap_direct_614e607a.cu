// attention_backward_sm90a_bf16_dim192_causal_v128_64x128_rows_overlap_direct_614e607a
//
// The gradients of o = p v, p = softmax(s) by rows, from do and the forward's lse, where
//   s = scale q k^T
//   p = exp(s - lse)    dp = do v^T    delta = rowsum(do * o) - dlse    ds = p (dp - delta)
//   dv = p^T do         dq = scale ds k         dk = scale ds^T q
//   bf16, head dimension 192, of v 128, mask causal, fixed lengths
//   q tile 64, KV tile 128, 2 consumers, 2 stages, overlap, dq added direct, rows shared
// Digest 614e607a80c9a63842e0cea5f3e54a32a4ebb8707775dba5aaca28a38f26209e; `warploom show` prints this file.
//
// Three kernels, in the order of launch:
//   preprocess   a CTA of 256 threads per tile of q: delta, lse; zeros dq_sum
//   main         1 cluster of 2 CTAs of 384 threads per KV tile and KV head: dk, dv; adds to dq_sum
//   postprocess  a CTA of 256 threads per tile of q: dq from dq_sum
// Main, 1 CTA per SM; a step is a tile of q and do:
// Warpgroup 0, the producer: thread 0 issues the TMA loads of k, v, q, do and statistics
// Warpgroups 1 and 2, the consumers: scores of 32 rows of q, half of the columns of dk and dv each, by wgmma
// Registers per thread: 168 at launch; setmaxnreg: producer 24, consumers 240 (24 + 2 * 240 <= 3 * 168)
//   A consumer thread has 80 accumulators of dk and dv;
//   in a step 32 of scores and dp, then 24 of dq
// Shared memory: 169984 bytes; the launch asks for 169984 of 232448
//   k            64 rows = 24576
//   v            64 rows = 16384
//   q            2 stages * 24576 = 49152
//   d_o          2 stages * 16384 = 32768
//   ds           1 stage * 16384 = 16384
//   p            2 stages * 8192 = 16384
//   peer_k       half of the columns = 12288
//   statistics   2 stages * 512 = 1024
//   barriers     and padding = 1024
// Barriers         waited for by    guards                            a phase completes after
// k_full, v_full   consumers        k and v until they are loaded     1 arrival and the bytes of TMA
// q_full, do_full  consumers        a stage until it is filled        1 arrival and the bytes of TMA
// q_empty          the producer     q until dk is there               8 arrivals: consumer warps
// do_empty         the producer     do until dv is there              8 arrivals: consumer warps
// peer_full        consumers        ds of the peer CTA                1 arrival and a box of ds
// peer_empty       consumers        ds in the peer until dq is there  8 arrivals of the peer: consumer warps
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
constexpr int kDim = 192, kSpan = 32;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kDimV = 128, kValueSpan = 128;  // of v, o and do, whose tiles are boxes likewise
constexpr int kValueBoxColumns = kValueSpan / 2, kValueBoxes = kDimV / kValueBoxColumns;
constexpr int kConsumers = 2;  // warpgroups, beside a producer
constexpr int kWgmmaM = 64, kQTile = 64, kKvTile = kWgmmaM * kConsumers;
// Tiles in flight: of q, of do, of ds.
constexpr int kStages = 2, kDoStages = 2, kDsStages = 1;
// Rows of k and v that a CTA has; of q, whose scores a warpgroup computes.
constexpr int kKvRows = 64, kQRows = 32;
// Parts that the columns of dq, dk and dv are divided into; columns of one.
constexpr int kParts = 2, kColumns = kDim / kParts;
constexpr int kScores = kQRows / 2, kGradients = kColumns / 2;  // accumulators of a thread: of p or dp, of dk or dv
constexpr int kValueColumns = kDimV / kParts, kValueGradients = kValueColumns / 2;  // the same of dv
// Parts that columns of dq are divided into; columns of one.
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
  cute::TmaDescriptor dk_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor dv_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor statistics_map;  // [row, statistics of q tiles], by a q tile
  float* lse;  // [batch, heads, seq_q]
  float* dlse;  // the gradient of lse, laid out as it is; may be null
  float* statistics;  // [head, q tile, kStatistics, row]
  float* dq_sum;  // [head, q tile, ...]: dq, as accumulators are laid out
  Element* o_rows;  // o, by the strides below
  Element* do_rows;  // do, by the strides below
  Element* dq_rows;  // dq, by the strides below
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
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t kv_tiles;  // of one head
  int32_t q_tiles;  // of one head
  int32_t section;  // kv heads whose tiles are processed together
  int32_t all_kv_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t dim;  // of the tensors, at most kDim
  int32_t dim_v;  // of v, o and do; at most kDimV
  int32_t right;  // row r sees no column after r + right
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 1280);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, do_map) == 384);
static_assert(OFFSET(Parameters, dq_map) == 512 && OFFSET(Parameters, dk_map) == 640);
static_assert(OFFSET(Parameters, dv_map) == 768 && OFFSET(Parameters, statistics_map) == 896);
static_assert(OFFSET(Parameters, lse) == 1024 && OFFSET(Parameters, dlse) == 1032);
static_assert(OFFSET(Parameters, statistics) == 1040 && OFFSET(Parameters, dq_sum) == 1048);
static_assert(OFFSET(Parameters, o_rows) == 1056 && OFFSET(Parameters, do_rows) == 1064);
static_assert(OFFSET(Parameters, dq_rows) == 1072 && OFFSET(Parameters, non_finite) == 1080);
static_assert(OFFSET(Parameters, o_batch) == 1088 && OFFSET(Parameters, o_head) == 1096);
static_assert(OFFSET(Parameters, o_seq) == 1104 && OFFSET(Parameters, do_batch) == 1112);
static_assert(OFFSET(Parameters, do_head) == 1120 && OFFSET(Parameters, do_seq) == 1128);
static_assert(OFFSET(Parameters, dq_batch) == 1136 && OFFSET(Parameters, dq_head) == 1144);
static_assert(OFFSET(Parameters, dq_seq) == 1152 && OFFSET(Parameters, heads) == 1160);
static_assert(OFFSET(Parameters, seq_q) == 1164 && OFFSET(Parameters, seq_k) == 1168);
static_assert(OFFSET(Parameters, kv_tiles) == 1172 && OFFSET(Parameters, q_tiles) == 1176);
static_assert(OFFSET(Parameters, section) == 1180 && OFFSET(Parameters, all_kv_heads) == 1184);
static_assert(OFFSET(Parameters, sharing) == 1188 && OFFSET(Parameters, dim) == 1192);
static_assert(OFFSET(Parameters, dim_v) == 1196 && OFFSET(Parameters, right) == 1200);
static_assert(OFFSET(Parameters, scale) == 1204);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 32] += A[64 x 16] * B[16 x 32]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[16], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 96] += A[64 x 16] * B[16 x 96]; A and B by descriptor, D in registers.
struct KeyWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[48], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, add, 1, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 64] += A[64 x 16] * B[16 x 64]; A and B by descriptor, D in registers.
struct ValueWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, add, 1, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
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
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, add, 1, 1, 0, 1;\n}\n"
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

// The same of rows of v and do, whose head dimension is kDimV: boxes of kValueSpan bytes a row.
template <int kRows> struct ValueTile {
  static constexpr int kBoxBytes = kRows * kValueSpan, kBytes = kValueBoxes * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint64_t hint,
                                              uint8_t* tile, BoxCoord coord, int head) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int box = 0; box < kValueBoxes; ++box)
      load_box(map, full, hint, tile + box * kBoxBytes, box * kValueBoxColumns, coord, head);
  }

  __device__ __forceinline__ static constexpr int columns(int step) {
    return (step * 32 / kValueSpan * kBoxBytes + step * 32 % kValueSpan) / 16;
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
constexpr int kVBytes = ValueTile<kKvRows>::kBytes, kDoBytes = ValueTile<kQTile>::kBytes;
constexpr int kStatisticsBytes = kStatistics * kQTile * 4;
constexpr int kDsBoxBytes = kQTile * 128;  // ds by rows of q: 64 columns a box

struct SharedStorage {
  alignas(1024) uint8_t k[kKvBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t v[kVBytes];
  alignas(1024) uint8_t q[kStages][kQBytes];
  alignas(1024) uint8_t d_o[kDoStages][kDoBytes];
  alignas(1024) uint8_t ds[kDsStages][kKvTile / kWgmmaM][kDsBoxBytes];
  alignas(1024) uint8_t p[2][kDsBoxBytes];  // laid as ds is, of the CTA's own rows of k
  alignas(1024) uint8_t peer_k[kKvBytes / kParts];  // the peer's rows, of the columns of dq that this CTA adds
  struct alignas(128) { float rows[kStatistics][kQTile]; } statistics[kStages];  // guarded by q's barriers
  FullBarrier k_full, v_full, q_full[kStages], do_full[kDoStages];  // TMA's bytes have arrived
  EmptyBarrier q_empty[kStages], do_empty[kDoStages];               // every reader is done with them
  FullBarrier peer_full;    // the peer's box of ds has arrived
  EmptyBarrier peer_empty;  // the peer has multiplied dq with the box that was sent to it
};
static_assert(sizeof(SharedStorage) <= 169984);

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
  // A CTA has nothing to do where no row attends to its tile.
  const bool any = begin < end;
  return {at.sequence, at.head, at.column, part, begin / kQTile, any ? (end + kQTile - 1) / kQTile : 0,
          at.first_tile};
}

// The index of the CTA's work.
__device__ __forceinline__ int number(const Parameters&, SharedStorage&) { return blockIdx.x; }

// The q tile in place n of [begin, end). Nothing decides which of two CTAs adds to the dq of one q tile first.
__device__ __forceinline__ int walk(const Parameters&, const Work&, int n) { return n; }

// ---- Producer: one thread keeps q and do coming --------------------------------------------------
// Starts the load of v, and of the peer's rows of k for dq: of the columns that the CTA adds.
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, const Work& work,
                                            BoxCoord columns) {
  shared.v_full.arrive_and_expect_tx(kVBytes + kKvBytes / kParts);
  ValueTile<kKvRows>::load(p.v_map, shared.v_full, kEvictFirst, shared.v, columns, work.head);
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
      do_full.arrive_and_expect_tx(kDoBytes);
      ValueTile<kQTile>::load(do_map, do_full, kEvictLast, shared.d_o[position.stage], rows, head);
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

// Issues dp^T = v do^T.
__device__ __forceinline__ void multiply_values(float (&dp)[kScores], uint64_t rows, uint64_t columns) {
  fence(dp);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDimV / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(rows + ValueTile<kKvRows>::columns(step), columns + ValueTile<kQTile>::columns(step), dp, step > 0);
  cute::warpgroup_commit_batch();
}

// dq = ds k: a warpgroup has 64 rows of q, and the columns of the head dimension or a part of them.
// Issues the MMA over a CTA's rows of k; with kMore it is added to the one that was issued before.
template <bool kMore = false>
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer / kQuerySplits * kWgmmaM * 128 / 16;
  k += consumer % kQuerySplits * (kQueryN / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  if (!kMore) fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16, k + step * QueryWgmma::kK * kSpan / 16,
                    dq, kMore || step > 0);
  cute::warpgroup_commit_batch();
}

// Takes the sums of a q tile apart: `take` gets (row, column, values of 8 columns). Of a fragment of 8
// columns lane l holds two of row l / 4, then two of the row 8 further down.
constexpr int kPieces = kPartSums / 16;
template <class Take> __device__ __forceinline__ void unpack(const float4* sums, int piece, Take&& take) {
  constexpr int kFragments = kQueryN / 8;
  // A row pair is a row and the row 8 further down: the same four lanes have both.
  const int fragment = piece % (kColumns / 8), row_pair = piece / (kColumns / 8);
  const int warp = (row_pair / 32 * kQuerySplits + fragment / kFragments) * 4 + row_pair / 8 % 4;
  const int row = row_pair / 32 * kWgmmaM + row_pair / 8 % 4 * 16 + row_pair % 8;
  float values[2][8];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float4 four = sums[(warp * kFragments + fragment % kFragments) * 32 + row_pair % 8 * 4 + i];
    values[0][2 * i] = four.x, values[0][2 * i + 1] = four.y;
    values[1][2 * i] = four.z, values[1][2 * i + 1] = four.w;
  }
  take(row, fragment * 8, values[0]);
  take(row + 8, fragment * 8, values[1]);
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
  template <int kRows> __device__ __forceinline__ static int value_columns(int part) {
    return part * (kValueBoxes / kParts) * ValueTile<kRows>::kBoxBytes / 16;
  }
  __device__ __forceinline__ uint64_t staged_q(Position at) const { return q + at.stage * kQBytes / 16; }
  __device__ __forceinline__ uint64_t staged_do(Position at) const { return d_o + at.stage * kDoBytes / 16; }
  __device__ __forceinline__ const uint8_t* own_ds(Step step) const {
    return shared.ds[0][box];
  }
  __device__ __forceinline__ uint64_t staged_ds(Step step) const {
    return ds;
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

__device__ __forceinline__ void multiply_dv(float (&gradient)[kValueGradients], uint64_t weights,
                                            uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / ValueWgmma::kK; ++step)
    ValueWgmma::fma(weights + step * ValueWgmma::kK * 128 / 16, rows + step * ValueWgmma::kK * kValueSpan / 16, gradient,
                    true);
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
  const uint64_t peer_k = matrix(c.shared.peer_k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 3);
  c.shared.peer_full.wait(step.parity);
  multiply_query<true>(dq, c.staged_ds(step) + (1 - c.box) * kDsBoxBytes / 16, peer_k, c.consumer);
}

// Tells the peer that dq has been multiplied with the box that it sent.
__device__ __forceinline__ void release_ds(const Consumer& c) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) c.shared.peer_empty.arrive(1 - c.part);
}

// Adds a warpgroup's part of dq to the sums of its q tile. They lie as the accumulators do, four of a
// thread after those of its neighbour.
__device__ __forceinline__ void accumulate(const Consumer& c, const float (&dq)[kQueries], Step step) {
  const int lane = threadIdx.x % 32, warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  float* sums = c.p.dq_sum + int64_t(step.tile * kParts + c.part) * kPartSums + warp * (kQueries * 32) + lane * 4;
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], { %1, %2, %3, %4 };" ::"l"(sums + i * 128), "f"(dq[4 * i]),
                 "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                 : "memory");
}

// The steps of a consumer of a pair, one for each q tile: the scores of the next are multiplied while dq
// leaves, dp while p is computed, dv while ds is, dk and the CTA's own half of dq while the peer's ds is on its
// way. No wait may leave MMAs of the step before in flight: ptxas does not see around the loop, and would wait
// for all of them.
struct Steps {
  float scores[kScores];  // of the next step

  __device__ __forceinline__ void begin(const Consumer& c, Position at) {
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k, c.staged_q(at) + c.row * kSpan / 16);
    c.shared.v_full.wait(0);
  }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kValueGradients], Step step,
                                       Position at, bool more) {
    const int half = c.row * kSpan / 16;  // of the q tile, in a descriptor
    float dp[kScores], dq[kQueries];
    Weights weights;  // p^T, then ds^T
    c.shared.do_full[at.stage].wait(at.phase);
    cute::warpgroup_wait<0>();  // the scores are there
    fence(scores);
    multiply_values(dp, c.v, c.staged_do(at) + c.row * kValueSpan / 16);
    weigh(c, weights, scores, step, at);
    write(c, own_p(c, step), weights);
    meet();
    multiply_dv(dv, staged_p(c, step), c.staged_do(at) + c.value_columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dp is there; dv's MMAs run on
    fence(dp);
    differentiate(c, dp, scores, at);
    pack(weights, dp);
    await_ds(c, step);
    write(c, c.own_ds(step), weights);
    meet();
    exchange(c, step);
    multiply_gradient(dk, own_ds(c, step), c.staged_q(at) + c.columns<kQTile>(c.consumer));
    multiply_own_query(c, dq, step);
    cute::warpgroup_wait<2>();  // dv is there; dk's and dq's MMAs run on
    fence(dv);
    release(c.shared.do_empty[at.stage]);
    multiply_peer_query(c, dq, step);
    // After the last step this multiplies what the stage happens to hold, and nobody looks at it.
    Position ahead = at;
    ahead.advance();
    if (more) c.shared.q_full[ahead.stage].wait(ahead.phase);
    multiply_scores(scores, c.k, c.staged_q(ahead) + half);
    cute::warpgroup_wait<1>();  // dk and dq are there; the next scores' MMAs run on
    fence(dk);
    fence(dq);
    release(c.shared.q_empty[at.stage]);
    release_ds(c);
    accumulate(c, dq, step);
  }

  // The peer reads the last box of ds, and says that it has: after that nobody touches the CTA's memory.
  __device__ __forceinline__ void end(const Consumer& c, int count) {
    cute::warpgroup_wait<0>();  // what was multiplied ahead of the last step's end reads a stage of q
    fence(scores);
    await_ds(c, {0, 0, count % 2u});
  }
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

// The same of dv.
__device__ __forceinline__ void stage_dv(uint8_t* rows, const float (&gradient)[kValueGradients], float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  CUTE_UNROLL
  for (int i = 0; i < kValueColumns / 16; ++i) {
    const float* x = gradient + i * 8;
    const int offset = row * kValueSpan + i * 32 % kValueSpan + lane / 16 * 16;
    const uint32_t address = cute::cast_smem_ptr_to_uint(rows) +
                             i * 32 / kValueSpan * ValueTile<kKvRows>::kBoxBytes +
                             (offset ^ ((offset >> 3) & (kValueSpan - 16)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(address),
                 "r"(pair(x[0] * scale, x[1] * scale)), "r"(pair(x[2] * scale, x[3] * scale)),
                 "r"(pair(x[4] * scale, x[5] * scale)), "r"(pair(x[6] * scale, x[7] * scale))
                 : "memory");
  }
}

__device__ __forceinline__ void store_dv(const cute::TmaDescriptor& map, const uint8_t* rows,
                                         const Consumer& c) {
  const BoxCoord coord = c.work.sequence.columns_at<kWgmmaM>(c.column);
  for (int box = 0; box < kValueBoxes / kParts; ++box)
    store_box(map, rows + box * ValueTile<kKvRows>::kBoxBytes, c.consumer * kValueColumns + box * kValueBoxColumns, coord,
              c.work.head);
  cute::tma_store_arrive();
}

// The gradients leave through the memory of v and k, each warpgroup's through the boxes of its columns: all have the same rows.
__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[kValueGradients]) {
  const int own = 16 * c.columns<kKvRows>(c.consumer);
  const int own_v = 16 * c.value_columns<kKvRows>(c.consumer);
  meet();  // the other warpgroup reads the same rows of v
  stage_dv(c.shared.v + own_v, dv, 1);
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier releases its thread
  meet();  // nobody reads k any more, either
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) store_dv(c.p.dv_map, c.shared.v + own_v, c);
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
  const uint64_t k = matrix(shared.k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 3);
  const uint64_t v = matrix(shared.v, ValueTile<kKvRows>::kBoxBytes, 8 * kValueSpan, 1);
  const uint64_t q = matrix(shared.q[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, 3);
  const uint64_t d_o = matrix(shared.d_o[0], ValueTile<kQTile>::kBoxBytes, 8 * kValueSpan, 1);
  const uint64_t ds = matrix(shared.ds[0][0], kDsBoxBytes, 8 * 128, 1);
  const Consumer c{p, shared, work, k, v, q, d_o, ds, consumer, part, row, box, own,
                   work.column + box * kWgmmaM,
                   Scaling(p)};
  float dk[kGradients], dv[kValueGradients];
  CUTE_UNROLL
  for (int i = 0; i < kGradients; ++i) dk[i] = 0;
  CUTE_UNROLL
  for (int i = 0; i < kValueGradients; ++i) dv[i] = 0;
  fence(dk);  // else the compiler takes the zeros before setmaxnreg, and has too few registers for them there
  fence(dv);
  if (work.begin < work.end) {
    Steps steps;
    Position position{0, 0};
    const int count = (work.end - work.begin) * p.sharing;
    shared.k_full.wait(0);
    steps.begin(c, position);  // waits for v, too
    int n = work.begin, tile = work.first_tile;  // of the head's first q tile
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const int m = walk(p, work, n);
      steps.next(c, dk, dv, {m * kQTile, tile + m, i % 2u}, position, i + 1 < count);
      position.advance();
      if (++n == work.end) {  // on to the next head
        n = work.begin;
        tile += p.q_tiles;
      }
    }
    steps.end(c, count);
  }
  store_gradients(c, dk, dv);
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_backward_sm90a_bf16_dim192_causal_v128_64x128_rows_overlap_direct_614e607a(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q_map, &p.k_map, &p.v_map, &p.do_map, &p.statistics_map, &p.dk_map, &p.dv_map})
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
    shared.peer_full.init(1);
    shared.peer_empty.init(4 * kConsumers);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const Work work = locate(p, number(p, shared));
  if (work.column >= work.sequence.columns(p)) return;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 0) produce(p, shared, work);
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
    // Main reads kDimV columns there: what do has not is 0, as it is beyond the end of a row of dq.
    if (row >= at.sequence.rows(p) || column >= min(kDimV, p.dim)) continue;
    const bool masked = is_fully_masked(p, at.head, p.lse[at.sequence.lse_at(p, at.head, row)]);
    const int64_t do_row = at.sequence.row_at(p.do_batch, p.do_head, p.do_seq, at.head, row);
    const int64_t dq_row = at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, row);
    *reinterpret_cast<uint4*>(p.dq_rows + dq_row + column) =
        masked || column >= p.dim_v ? uint4{0, 0, 0, 0}
                                    : *reinterpret_cast<const uint4*>(p.do_rows + do_row + column);
  }
}

// delta = rowsum(do * o) - dlse and lse in base 2, for main to read; zeros where main adds dq.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    attention_backward_sm90a_bf16_dim192_causal_v128_64x128_rows_overlap_direct_614e607a_preprocess(const __grid_constant__ Parameters p) {
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
    if (row < rows && column < p.dim_v) {
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
    attention_backward_sm90a_bf16_dim192_causal_v128_64x128_rows_overlap_direct_614e607a_postprocess(const __grid_constant__ Parameters p) {
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
