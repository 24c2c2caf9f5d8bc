// attention_backward_sm90a_bf16_dim64_blocks_dropout_64x128_2711b675
//
// The gradients of o = p v, p = softmax(s) by rows, from do and the forward's lse, where
//   s = scale q k^T
//   p = exp(s - lse)    dp = do v^T    delta = rowsum(do * o) - dlse    ds = p (dp - delta)
//   dv = p^T do         dq = scale ds k         dk = scale ds^T q
//   where p of dv, and dp, are 0 for a weight that is dropped, and otherwise divided by p.keep
//   bf16, head dimension 64, mask none, fixed lengths, listed blocks
//   q tile 64, KV tile 128, 2 consumers, 2 stages, dq added bulk
// Digest 2711b67592bd0eecb8eb12ef16e0dbdab4d86a677ab0d0a751cc87c6ede5d8d5; `warploom show` prints this file.
//
// Three kernels, in the order of launch:
//   preprocess   a CTA of 256 threads per tile of q: delta, lse; zeros dq_sum
//   main         1 CTA of 384 threads per KV tile and KV head: dk, dv; adds to dq_sum
//   postprocess  a CTA of 256 threads per tile of q: dq from dq_sum
// Main, 1 CTA per SM; a step is a tile of q and do:
// Warpgroup 0, the producer: thread 0 issues the TMA loads of k, v, q, do and statistics
//   Warps 1 and 2, the writers: add dq of every second step each, by TMA reductions
//   Warp 3 makes random bits for dropout
// Warpgroups 1 and 2, the consumers: scores and gradients of 64 rows of k and v each, by wgmma
// Registers per thread: 168 at launch; setmaxnreg: producer 56, consumers 224 (56 + 2 * 224 <= 3 * 168)
//   A consumer thread has 64 accumulators of dk and dv;
//   in a step 64 of scores and dp, then 16 of dq
// Shared memory: 118784 bytes; the launch asks for 118784 of 232448
//   k               128 rows = 16384
//   v               128 rows = 16384
//   q               2 stages * 8192 = 16384
//   d_o             2 stages * 8192 = 16384
//   ds              2 stages * 16384 = 32768
//   sums            dq of one step in fp32 = 16384
//   words           a bit for each weight of the tiles = 2048
//   statistics      2 stages * 512 = 1024
//   work, barriers  and padding = 1024
// Barriers         waited for by    guards                           a phase completes after
// k_full, v_full   consumers        k and v until they are loaded    1 arrival and the bytes of TMA
// q_full, do_full  consumers        a stage until it is filled       1 arrival and the bytes of TMA
// q_empty          the producer     q until dk is there              8 arrivals: consumer warps
// do_empty         the producer     do until dv is there             8 arrivals: consumer warps
// sums_full        a writer         dq until it is in shared memory  8 arrivals: consumer warps
// sums_empty       consumers        dq until TMA has read it         1 arrival of a writer
// words_full       consumers        bits of a tile                   1 arrival: warps that make bits
// words_empty      makers           bits until they are read         8 arrivals: consumer warps
// named 1          all that arrive  ds until it is written           256 threads of consumers
// named 2, 3       all that arrive  dk until it is staged            128 threads of a consumer
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
constexpr int kDim = 64, kSpan = 64;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kConsumers = 2;  // warpgroups, beside a producer
// Warps of the producer's warpgroup that add dq, after the one that loads: each has that of every second step.
constexpr int kFirstWriter = 1, kWriters = 2;
constexpr int kWgmmaM = 64, kQTile = 64, kKvTile = kWgmmaM * kConsumers;
// Tiles in flight: of q, of do, of ds.
constexpr int kStages = 2, kDoStages = 2, kDsStages = 2;
// Rows of k and v that a CTA has; of q, whose scores a warpgroup computes.
constexpr int kKvRows = 128, kQRows = 64;
// Parts that the columns of dq, dk and dv are divided into; columns of one.
constexpr int kParts = 1, kColumns = kDim / kParts;
constexpr int kScores = kQRows / 2, kGradients = kColumns / 2;  // accumulators of a thread: of p or dp, of dk or dv
// Parts that columns of dq are divided into; columns of one.
constexpr int kQuerySplits = 2, kQueryN = 32;
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
  int64_t* dropout_state;  // [2]: what is drawn for each position follows from it
  int32_t* lists;  // of each tile, what is listed: [batch, head, tile]
  int4* listed;  // [batch, head, tile, list_tiles]
  uint32_t* masks;  // [mask, column, 32 rows]: a bit for every score, 1 where it counts
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
  int32_t list_tiles;  // that a list has room for
  int32_t list_batch;  // lists of a batch; 0: all have the same
  int32_t list_head;  // lists of a head; 0: all have the same
  float scale;  // of dot products of q and k
  float keep;  // probability that a weight is kept, a multiple of 1 / 65536
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
static_assert(OFFSET(Parameters, dropout_state) == 1088 && OFFSET(Parameters, lists) == 1096);
static_assert(OFFSET(Parameters, listed) == 1104 && OFFSET(Parameters, masks) == 1112);
static_assert(OFFSET(Parameters, o_batch) == 1120 && OFFSET(Parameters, o_head) == 1128);
static_assert(OFFSET(Parameters, o_seq) == 1136 && OFFSET(Parameters, do_batch) == 1144);
static_assert(OFFSET(Parameters, do_head) == 1152 && OFFSET(Parameters, do_seq) == 1160);
static_assert(OFFSET(Parameters, dq_batch) == 1168 && OFFSET(Parameters, dq_head) == 1176);
static_assert(OFFSET(Parameters, dq_seq) == 1184 && OFFSET(Parameters, heads) == 1192);
static_assert(OFFSET(Parameters, seq_q) == 1196 && OFFSET(Parameters, seq_k) == 1200);
static_assert(OFFSET(Parameters, kv_tiles) == 1204 && OFFSET(Parameters, q_tiles) == 1208);
static_assert(OFFSET(Parameters, section) == 1212 && OFFSET(Parameters, all_kv_heads) == 1216);
static_assert(OFFSET(Parameters, sharing) == 1220 && OFFSET(Parameters, dim) == 1224);
static_assert(OFFSET(Parameters, list_tiles) == 1228 && OFFSET(Parameters, list_batch) == 1232);
static_assert(OFFSET(Parameters, list_head) == 1236 && OFFSET(Parameters, scale) == 1240);
static_assert(OFFSET(Parameters, keep) == 1244);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 64] += A[64 x 16] * B[16 x 64]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 64] += A[64 x 16] * B[16 x 64]; A in registers, B by descriptor, D in registers.
struct KeyWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// D[64 x 32] += A[64 x 16] * B[16 x 32]; A and B by descriptor, D in registers.
struct QueryWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[16], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
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

// ---- Dropout: which weights are dropped --------------------------------------------------------------
// A function of state, batch, head, row and column alone, so that every tile of either pass finds the same. A
// patch is 16 rows by 16 columns, in 8 words of 32 weights. That of row 8 h + 2 i + r and column 8 a + 4 g + 2
// b + c has a bit of word 2 i + g: 16 h + 8 c + 7 - 4 r - 2 b - a, 1 where it is dropped. A thread of the
// forward pass has all h, c and a of a word, one of the backward pass all h, r and a. A weight is dropped where
// its number, of 8 random bits, is at least the threshold: 2^8 keep, rounded down or up as one more number
// says, so that each is kept with probability keep to 2^-16. Random words are of one bit of the numbers of 32
// weights, which are compared at once, from the lowest bit on. Words 0 to 3 share the two lowest bits and the
// number that rounds, and so do words 4 to 7: these count where the six bits above equal the threshold's, once
// in 2^6. docs/families/attention_forward.md says how much that correlates. Philox4x32 (Salmon et al., 2011; in
// 7 rounds, the fewest that pass BigCrush, with key 0) of the call's state, and again of that with the patch's
// place added bit by bit, seeds numbers of 64 bits, u[n + 3] = u[n] + c low(u[n + 1]), whose upper halves are
// the random words. The lower ones are a recursive generator modulo 2^32, c = 2^32 - 69069 (docs/notebook.md).
struct Dropout {
  // For lack of registers: what Philox makes of the state, and words of the threshold's bits that are 0,
  // rounded down.
  using Shared = uint4[3];
  static constexpr int kBits = 8, kSharedBits = 2;
  uint32_t shared, share;  // the latter of 2^32 numbers of words: those that round up

  __device__ __forceinline__ Dropout(const Parameters& p, Shared& shared) {
    const uint2* given = reinterpret_cast<const uint2*>(p.dropout_state);
    uint32_t state[4] = {given[0].x, given[0].y, given[1].x, given[1].y};
    philox(state);
    const int threshold = int(p.keep * 65536), lane = threadIdx.x % 32;
    if (lane == 0) shared[0] = make_uint4(state[0], state[1], state[2], state[3]);
    if (lane < 8) reinterpret_cast<uint32_t*>(shared + 1)[lane] = (threshold >> (8 + lane) & 1) - 1;
    __syncwarp();
    this->shared = cute::cast_smem_ptr_to_uint(&shared), share = uint32_t(threshold) << 24;
  }
  __device__ __forceinline__ uint4 read(int offset) const {
    uint4 four;  // volatile, or it is kept
    asm volatile("ld.volatile.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "r"(shared + offset));
    return four;
  }
  __device__ __forceinline__ static void philox(uint32_t (&x)[4]) {
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      uint64_t first, second;  // not by *: the compiler would add products of upper halves, which are 0
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(first) : "r"(x[0]), "r"(0xd2511f53));
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(second) : "r"(x[2]), "r"(0xcd9e8d57));
      x[0] = uint32_t(second >> 32) ^ x[1] ^ round * 0x9e3779b9u;
      x[2] = uint32_t(first >> 32) ^ x[3] ^ round * 0xbb67ae85u;
      x[1] = uint32_t(second), x[3] = uint32_t(first);
    }
  }

  // Makes the words of the patch in a row and column of a head; heads are counted through all batches.
  __device__ __forceinline__ void make(uint4 (&words)[2], uint32_t head, uint2 patch) const {
    const uint4 state = read(0);
    uint32_t x[4] = {patch.x ^ state.x, patch.y ^ state.y, head ^ state.z, state.w};
    philox(x);
    const uint4 low_zeros = read(16), high_zeros = read(32);
    const uint32_t zeros[kBits] = {low_zeros.x, low_zeros.y, low_zeros.z, low_zeros.w,
                                   high_zeros.x, high_zeros.y, high_zeros.z, high_zeros.w};
    uint32_t low[3] = {x[0], x[1], x[2]}, high[3] = {x[3], x[3], x[3]};  // of the last three numbers
    const auto draw = [&] {
      const uint64_t sum = uint64_t(low[1]) * (0u - 69069u) + (uint64_t(high[0]) << 32 | low[0]);
      low[0] = low[1], low[1] = low[2], low[2] = uint32_t(sum);
      high[0] = high[1], high[1] = high[2], high[2] = uint32_t(sum >> 32);
      asm("" : "+r"(low[2]), "+r"(high[2]));  // else the compiler takes several steps at once, of more instructions
      return high[2];
    };
    const auto compare = [&](uint32_t& word, int bit) {
      const uint32_t drawn = draw();
      word = (drawn & word) | (zeros[bit] & (drawn | word));  // 1 is above 0
    };
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t of_four = draw() < share ? 0 : ~0u, dropped[4];  // of numbers as the threshold is
      CUTE_UNROLL
      for (int bit = 0; bit < kSharedBits; ++bit) compare(of_four, bit);
      CUTE_UNROLL
      for (int word = 0; word < 4; ++word) {
        dropped[word] = of_four;
        CUTE_UNROLL
        for (int bit = kSharedBits; bit < kBits; ++bit) compare(dropped[word], bit);
      }
      words[i] = make_uint4(dropped[0], dropped[1], dropped[2], dropped[3]);
    }
  }
};

// Warps of the producer's warpgroup that make words, as far ahead as there are stages.
constexpr int kMakers = 1, kFirstMaker = 4 - kMakers, kWordStages = 2;

// Makes a maker's share of the patches of a tile, with a turn's number; `coord` gives a patch's row and column.
template <int kCount, class Coord>
__device__ __forceinline__ void make_words(uint4 (&words)[kCount][2], const Dropout& dropout, uint32_t head,
                                           int& turn, Coord&& coord) {
  CUTE_NO_UNROLL
  for (int i = turn * 32 + threadIdx.x % 32; i < kCount; i += kMakers * 32)
    dropout.make(words[i], head, coord(i));
  // Who begins changes from tile to tile: there may be less to do than there are makers.
  turn = turn == 0 ? kMakers - 1 : turn - 1;
}

// ---- Work: a KV tile of one KV head, and a part of what is to be done for it -------------------------
// Its q tiles are [begin, end) of each query head; in storage they are numbered from `first_tile` on.
struct Work {
  Sequence sequence;
  int head, column;  // of k; the tile's first
  int part;          // the columns of dq are [part * kColumns, (part + 1) * kColumns)
  int begin, end, first_tile;
  int list;  // of the first query head; `end` counts what the lists of all have
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
  uint4 words[kWordStages][kConsumers * 4 * kQRows / 16][2];  // of a warp's columns, 16 rows after the other
  Dropout::Shared dropout[kMakers];
  EmptyBarrier words_full[kWordStages], words_empty[kWordStages];
  FullBarrier k_full, v_full, q_full[kStages], do_full[kDoStages];  // TMA's bytes have arrived
  EmptyBarrier q_empty[kStages], do_empty[kDoStages];               // every reader is done with them
  int mask[kStages];  // of the q tile, -1: all of it counts; guarded by q's barriers
  Work work;  // where registers are too few for it
  EmptyBarrier sums_full[kWriters], sums_empty;  // the step's dq is laid down for its writer; TMA has read it
};
static_assert(sizeof(SharedStorage) <= 118784);

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
  const int list = at.sequence.batch * p.list_batch + at.head * p.sharing * p.list_head + tile;
  int steps = 0;
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i) steps += p.lists[list + i * p.list_head];
  return {at.sequence, at.head, at.column, part, 0, steps, at.first_tile, list};
}

// The index of the CTA's work.
__device__ __forceinline__ int number(const Parameters&, SharedStorage&) { return blockIdx.x; }

// Of a KV tile and a query head, by the head's number among those of the KV head: what is listed of each q tile
// to walk is its number, its mask (-1: all of it counts), and how many KV tiles further left add to its dq.
struct List {
  const int4* entries;
  int count;

  __device__ __forceinline__ List(const Parameters& p, const Work& work, int head) {
    const int list = work.list + head * p.list_head;
    entries = p.listed + int64_t(list) * p.list_tiles;
    count = p.lists[list];
  }
};

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
  bool first = true;
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i) {
    const int head = work.head * p.sharing + i;
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n) {
      const int4 listed = list.entries[n];
      const int m = listed.x;
      const BoxCoord rows = work.sequence.rows_at<kQTile>(m * kQTile);
      // Where do of a fully masked row is not finite, preprocess left a copy of do in dq, with zeros there. Read
      // before the waits, to be there early.
      const auto& do_map = p.non_finite[work.first_tile + i * p.q_tiles + m] ? p.dq_map : p.do_map;
      FullBarrier &q_full = shared.q_full[position.stage], &do_full = shared.do_full[position.stage];
      shared.q_empty[position.stage].wait(position.phase);
      shared.mask[position.stage] = listed.y;  // released with what comes next
      q_full.arrive_and_expect_tx(kQBytes + kStatisticsBytes);
      Tile<kQTile>::load(p.q_map, q_full, kEvictLast, shared.q[position.stage], rows, head);
      cute::SM90_TMA_LOAD_2D::copy(&p.statistics_map, reinterpret_cast<uint64_t*>(&q_full), kEvictLast,
                                   shared.statistics[position.stage].rows, 0,
                                   kStatistics * (work.first_tile + i * p.q_tiles + m));
      if (first) load_values(p, shared, work, columns);
      first = false;
      shared.do_empty[position.stage].wait(position.phase);
      do_full.arrive_and_expect_tx(kQBytes);
      Tile<kQTile>::load(do_map, do_full, kEvictLast, shared.d_o[position.stage], rows, head);
      position.advance();
    }
  }
}

// ---- Makers of words: ahead of the consumers, for every q tile that the CTA walks ----------------------
__device__ __forceinline__ void make(const Parameters& p, SharedStorage& shared, const Work& work) {
  constexpr int kPatches = kQRows / 16;
  const Dropout dropout(p, shared.dropout[threadIdx.x / 32 - kFirstMaker]);
  const int column = work.column / 16;
  int turn = threadIdx.x / 32 - kFirstMaker;
  PipelineState<kWordStages> at{0, 1};
  CUTE_NO_UNROLL
  for (int i = 0; i < p.sharing; ++i) {
    const uint32_t head = work.sequence.batch * (p.heads) + work.head * p.sharing + i;
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n) {
      const int m = list.entries[n].x;
      shared.words_empty[at.stage].wait(at.phase);
      make_words(shared.words[at.stage], dropout, head, turn, [&](int i) {
        const int consumer = i / (kPatches * 4), box = consumer;
        const int first = m * (kQTile / 16);
        return make_uint2(first + i % kPatches, column + box * (kWgmmaM / 16) + i / kPatches % 4);
      });
      release(shared.words_full[at.stage]);
      at.advance();
    }
  }
}

// Of 16 rows after the other, of which a thread has 8 weights.
using Words = uint32_t[kQRows / 16];

// Whether accumulator i is of a weight that is dropped.
__device__ __forceinline__ bool is_dropped(const Words& words, int i) {
  return words[i / 8] >> (i / 4 % 2 * 16 + 5 - i % 2 * 4 - i / 2 % 2) & 1;
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

// dq = ds k: a warpgroup has 64 rows of q, and the columns of the head dimension or a part of them.
// Issues the MMA over the rows of k.
__device__ __forceinline__ void multiply_query(float (&dq)[kQueries], uint64_t ds, uint64_t k, int consumer) {
  ds += consumer / kQuerySplits * kWgmmaM * 128 / 16;
  k += consumer % kQuerySplits * (kQueryN / kBoxColumns) * Tile<kKvRows>::kBoxBytes / 16;
  fence(dq);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvRows / QueryWgmma::kK; ++step)
    QueryWgmma::fma(ds + (step / 4 * kDsBoxBytes + step % 4 * 32) / 16, k + step * QueryWgmma::kK * kSpan / 16,
                    dq, step > 0);
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

// The statistics of the two rows of q that a thread has of the 8 of fragment i.
__device__ __forceinline__ float2 statistics(const float* of_rows, int i) {
  return reinterpret_cast<const float2*>(of_rows)[i * 4 + threadIdx.x % 4];
}

// A q tile: its first row, its number in storage, and whether the step's number is odd, and half of it.
struct Step {
  int row, tile;
  uint32_t parity, half_parity;
  int mask;  // of a listed tile, -1: all of it counts
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
  // What the producer says of a q tile that has arrived: under MMAs, since shared memory takes its time.
  __device__ __forceinline__ void read(Step& step, Position at) const {
    step.mask = shared.mask[at.stage];
  }
  __device__ __forceinline__ const uint8_t* own_ds(Step step) const {
    return shared.ds[step.parity][box];
  }
  __device__ __forceinline__ uint64_t staged_ds(Step step) const {
    return ds + step.parity * (kKvTile / kWgmmaM * kDsBoxBytes / 16);
  }

  // Reads which weights of a q tile are dropped.
  __device__ __forceinline__ void take(Words& words, Step step) const {
    const int lane = threadIdx.x % 32, patches = (consumer * 4 + threadIdx.x / 32 % 4) * (kQRows / 16);
    const auto* own = reinterpret_cast<const uint32_t(*)[8]>(shared.words[step.parity] + patches);
    shared.words_full[step.parity].wait(step.half_parity);
    CUTE_UNROLL
    for (int i = 0; i < kQRows / 16; ++i)
      words[i] = own[i][lane % 4 * 2 + lane / 16] >> (lane / 4 % 2 * 8 + 2 - lane / 8 % 2 * 2);
    release(shared.words_empty[step.parity]);
  }
};

// Hides what does not attend, which the tile's mask says: for every row of k a bit of each row of q. Who has
// which is said at `Steps`: wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, which are columns of
// the scores, and of every 8 columns, rows of q, 2 (l % 4) and the next.
__device__ __forceinline__ void hide(const Consumer& c, float (&scores)[kScores], int mask) {
  constexpr int kWords = kQTile / 32;
  const int column = c.box * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const uint32_t* words = c.p.masks + (int64_t(mask) * kKvTile + column) * kWords + c.row / 32;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int word = 0; word < kQRows / 32; ++word) {
      const uint32_t shown = words[8 * r * kWords + word] >> threadIdx.x % 4 * 2;
      CUTE_UNROLL
      for (int i = 8 * word; i < 8 * word + 8; ++i) {
        const int offset = i / 2 * 8 + i % 2;
        if ((shown >> offset % 32 & 1) == 0) scores[i / 2 * 4 + 2 * r + i % 2] = __uint_as_float(kHidden);
      }
    }
  }
}

// p = exp(s - lse); lse is inf for a fully masked row. s becomes p.
__device__ __forceinline__ void weigh(const Consumer& c, Weights& weights, float (&scores)[kScores], Step step,
                                      Position at, Words& words) {
  if (step.mask >= 0) hide(c, scores, step.mask);
  c.take(words, step);
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 lse = statistics(c.shared.statistics[at.stage].rows[0] + c.row, i);
    CUTE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      float &x = scores[4 * i + j], &y = scores[4 * i + j + 1];
      const float low = fast_exp2(x * c.scaling.exponent - lse.x),
                  high = fast_exp2(y * c.scaling.exponent - lse.y);
      const bool drops_low = is_dropped(words, 4 * i + j), drops_high = is_dropped(words, 4 * i + j + 1);
      weights[i / 2][i % 2 * 2 + j / 2] = pair(drops_low ? 0 : low, drops_high ? 0 : high);
      x = low;
      y = high;
    }
  }
}

// dp becomes ds = p (dp - delta); `weights` are what weigh() left in the scores.
__device__ __forceinline__ void differentiate(const Consumer& c, float (&dp)[kScores],
                                              const float (&weights)[kScores], Position at, const Words& words) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = statistics(c.shared.statistics[at.stage].rows[1] + c.row, i);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {  // dp is 0 where the weight is dropped
      const float weight = weights[4 * i + j], less = -weight * (j % 2 ? delta.y : delta.x);
      dp[4 * i + j] = is_dropped(words, 4 * i + j) ? less : fmaf(weight, dp[4 * i + j], less);
    }
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
  for (int i = 0; i < p.sharing; ++i) {
    const List list(p, work, i);
    CUTE_NO_UNROLL
    for (int n = 0; n < list.count; ++n, parity ^= 1) {
      if (parity != writer) continue;
      const int4 listed = list.entries[n];
      const int m = listed.x, sum_index = (work.first_tile + i * p.q_tiles + m) * kParts + work.part;
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

// The steps of a consumer, one for each q tile: one after the other, so that the fewest registers are in use at
// a time. In a step dp's MMA is in flight while p is computed (ptxas may move exponentials behind the wait for
// it), dv's while ds is written, and dk's while dq leaves.
struct Steps {
  __device__ __forceinline__ void begin(const Consumer& c, Position) { c.shared.v_full.wait(0); }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kGradients], Step step,
                                       Position at) {
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights, ds;
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(at));
    c.read(step, at);
    c.shared.do_full[at.stage].wait(at.phase);
    multiply_scores(dp, c.v + c.own, c.staged_do(at));
    cute::warpgroup_wait<1>();  // the scores are there; dp's MMAs run on
    fence(scores);
    Words words;
    weigh(c, weights, scores, step, at, words);
    cute::warpgroup_wait<0>();
    fence(dp);
    differentiate(c, dp, scores, at, words);
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
    store_box(map, rows + box * Tile<kKvRows>::kBoxBytes, c.part * kColumns + box * kBoxColumns, coord,
              c.work.head);
  cute::tma_store_arrive();
}

// The gradients leave through the memory of v and k, each warpgroup's through its rows of them.
__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[kGradients]) {
  const int own = c.consumer * kWgmmaM * kSpan;
  stage(c.shared.v + own, dv, 1 / c.p.keep);
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier releases its thread
  meet();  // nobody reads k any more, either
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) store(c.p.dv_map, c.shared.v + own, c);
  stage(c.shared.k + own, dk, c.p.scale / c.p.keep);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, 2 + c.consumer);
  if (leads) store(c.p.dk_map, c.shared.k + own, c);
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
}

// ---- Mainloop -----------------------------------------------------------------------------------------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, const Work work, int consumer) {
  constexpr int part = 0;
  const int box = consumer, own = box * kWgmmaM * kSpan / 16;
  constexpr int row = 0;
  const uint64_t k = matrix(shared.k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 2);
  const uint64_t v = matrix(shared.v, Tile<kKvRows>::kBoxBytes, 8 * kSpan, 2);
  const uint64_t q = matrix(shared.q[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, 2);
  const uint64_t d_o = matrix(shared.d_o[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, 2);
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
    const int count = work.end;
    shared.k_full.wait(0);
    steps.begin(c, position);  // waits for v, too
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      steps.next(c, dk, dv, {0, 0, i % 2u, i / 2 % 2u}, position);
      position.advance();
    }
  }
  store_gradients(c, dk, dv);
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_backward_sm90a_bf16_dim64_blocks_dropout_64x128_2711b675(const __grid_constant__ Parameters p) {
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
    for (int i = 0; i < kWriters; ++i) shared.sums_full[i].init(4 * kConsumers);
    shared.sums_empty.init(1);
    for (int i = 0; i < kWordStages; ++i) {
      shared.words_full[i].init(kMakers);
      shared.words_empty[i].init(4 * kConsumers);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) shared.work = locate(p, number(p, shared));
  __syncthreads();
  const Work& work = shared.work;
  if (work.column >= work.sequence.columns(p)) return;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (threadIdx.x == 0) produce(p, shared, work);
    if (threadIdx.x / 32 >= kFirstMaker) make(p, shared, work);
    const int writer = int(threadIdx.x) / 32 - kFirstWriter;
    if (threadIdx.x % 32 == 0 && writer >= 0 && writer < kWriters) add(p, shared, work, writer);
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
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
    attention_backward_sm90a_bf16_dim64_blocks_dropout_64x128_2711b675_preprocess(const __grid_constant__ Parameters p) {
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
      statistics[kQTile + i] = delta * p.keep;
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
    attention_backward_sm90a_bf16_dim64_blocks_dropout_64x128_2711b675_postprocess(const __grid_constant__ Parameters p) {
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
      for (int i = 0; i < 8; ++i) eight.values[i] = Element(values[i] * (p.scale / p.keep));
      *reinterpret_cast<Eight*>(dq + row * p.dq_seq + column) = eight;
    });
  }
}
