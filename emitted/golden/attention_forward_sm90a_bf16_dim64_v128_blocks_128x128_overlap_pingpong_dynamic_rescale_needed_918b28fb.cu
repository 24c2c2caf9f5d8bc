// attention_forward_sm90a_bf16_dim64_v128_blocks_128x128_overlap_pingpong_dynamic_rescale_needed_918b28fb
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = scale q k^T
//   bf16, head dimension 64, of v 128, mask none, fixed lengths, listed blocks
//   q tile 128, KV tile 128, 2 consumers, 2 stages, pingpong, overlap, scheduler dynamic
// Digest 918b28fbadc32bd53a7d58fd468e8c1b6bc144da42fc75eaade4a65a36d077ce; `warploom show` prints this file.
//
// Launch: 384 threads, 1 CTA per SM; grid: one CTA per SM, each of which takes the next tile of q from a counter
// Warpgroup 0, the producer: thread 0 issues the TMA loads of q, k and v
// Warpgroups 1 and 2, the consumers: scores, softmax and output of 64 rows of q each, by wgmma
//   Overlap: S(n) = q k^T and O += P(n + 1) v are in flight together, and the softmax
//   of S(n) runs under the latter; KV tiles n are visited from the last to the first
//   Ping-pong: consumers issue wgmma in turns; one's softmax runs under another's MMAs
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 <= 3 * 168)
//   A consumer thread needs about 196: 64 scores, 64 output, 32 weights in 16 bits, 36 others
// Shared memory: 132096 bytes; the launch asks for 132096 of 232448
//   q               2 stages * 2 consumers * 8192 = 32768
//   k               2 stages * 16384 = 32768
//   v               2 stages * 32768 = 65536
//   work, barriers  and padding = 1024
// Barriers        waited for by  guards                               a phase completes after
// q_full          its consumer   q and work of a consumer             1 arrival and the bytes of TMA
// q_empty         the producer   q until the last scores are there    4 arrivals: warps
// k_full, v_full  consumers      a stage until it is filled           1 arrival and the bytes of TMA
// k_empty         the producer   k until the scores are there         8 arrivals: consumer warps
// v_empty         the producer   v until the output is there          8 arrivals: consumer warps
// named 4, 5      one consumer   MMAs: one consumer issues at a time  256 threads of two consumers
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
constexpr int kDim = 64, kSpan = 128;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kDimV = 128, kValueSpan = 128;  // of a row of v's boxes
constexpr int kConsumers = 2;  // warpgroups with 64 rows of q each, beside a producer
constexpr int kWgmmaM = 64, kQTile = kWgmmaM * kConsumers, kKvTile = 128;
constexpr int kStages = 2, kQStages = 2;  // of k, of v; of q
constexpr float kSlack = 8;  // how far exponents of 2 may grow before the output is rescaled
constexpr int kScores = kKvTile / 2, kOutputs = kDimV / 2;  // accumulators of a thread
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr auto kEvictLast = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Weights = uint32_t[kKvTile / 16][4];  // softmax's result in 16 bits, as wgmma takes it from registers

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor q_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor k_map;  // [dim, seq, head, batch], by a kv tile
  cute::TmaDescriptor v_map;  // [dim, seq, head, batch], by a kv tile
  cutlass::bfloat16_t* o;  // as q, but for its strides
  float* lse;  // [batch, heads, seq_q]
  uint32_t* counter;  // tiles taken so far; 0 between launches
  int4* lists;  // of each tile, what is listed: [batch, head, tile]
  int32_t* listed;  // [batch, head, tile, list_tiles]
  uint32_t* masks;  // [mask, row, 32 columns]: a bit for every score, 1 where it counts
  int64_t o_batch_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t dim;  // of a head; at most kDim
  int32_t tiles;  // of all heads and batches
  int32_t q_tiles;  // of one head
  int32_t section;  // heads whose tiles are processed together
  int32_t all_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t list_tiles;  // that a list has room for
  int32_t list_batch;  // lists of a batch; 0: all have the same
  int32_t list_head;  // lists of a head; 0: all have the same
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, o) == 384);
static_assert(OFFSET(Parameters, lse) == 392 && OFFSET(Parameters, counter) == 400);
static_assert(OFFSET(Parameters, lists) == 408 && OFFSET(Parameters, listed) == 416);
static_assert(OFFSET(Parameters, masks) == 424 && OFFSET(Parameters, o_batch_stride) == 432);
static_assert(OFFSET(Parameters, o_head_stride) == 440 && OFFSET(Parameters, o_row_stride) == 448);
static_assert(OFFSET(Parameters, heads) == 456 && OFFSET(Parameters, seq_q) == 460);
static_assert(OFFSET(Parameters, seq_k) == 464 && OFFSET(Parameters, dim) == 468);
static_assert(OFFSET(Parameters, tiles) == 472 && OFFSET(Parameters, q_tiles) == 476);
static_assert(OFFSET(Parameters, section) == 480 && OFFSET(Parameters, all_heads) == 484);
static_assert(OFFSET(Parameters, sharing) == 488 && OFFSET(Parameters, list_tiles) == 492);
static_assert(OFFSET(Parameters, list_batch) == 496 && OFFSET(Parameters, list_head) == 500);
static_assert(OFFSET(Parameters, scale) == 504);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 128] += A[64 x 16] * B[16 x 128]; A and B by descriptor, D in registers.
struct ScoresWgmma {
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

// D[64 x 128] += A[64 x 16] * B[16 x 128]; A in registers, B by descriptor, D in registers.
struct OutputWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[64], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, add, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
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

// A stage of v, whose rows are of 16 bits: boxes of the head dimension side by side, kValueSpan bytes a row.
struct Values {
  static constexpr int kColumns = kValueSpan / 2, kBoxBytes = kKvTile * kValueSpan, kBytes = kDimV / kColumns * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              const Sequence& sequence, int key, int head) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int i = 0; i < kDimV / kColumns; ++i)
      load_box(map, full, kEvictLast, tile + i * kBoxBytes, i * kColumns, sequence.columns_at<kKvTile>(key), head);
  }
  __device__ __forceinline__ static uint64_t descriptor(const uint8_t* tile) {
    return matrix(tile, kBoxBytes, 8 * kValueSpan, 1);
  }

  // From the tile's start to where the 16 keys `step` begin, in a descriptor.
  __device__ __forceinline__ static constexpr int keys(int step) { return step * kValueSpan; }
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

// The tile scheduler: each CTA takes its next tile from a counter in global memory, one tile ahead, which hides
// the latency of the atomic. A launch increments the counter once for each tile, so that it wraps to 0 for the
// next launch.
struct Tiles {
  int taken = blockIdx.x - gridDim.x;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    index = gridDim.x + taken;
    if (index < p.tiles) taken = atomicInc(p.counter, p.tiles - 1);
    return index < p.tiles;
  }
};

// Ping-pong: consumers issue MMAs in turns, in a ring, so that one's softmax runs under the others' MMAs
// (CUTLASS: OrderedSequenceBarrier). Consumer w begins after named barrier 4 + w, at which the one before it
// arrives.
struct OrderedBarrier {
  int consumer;

  __device__ __forceinline__ explicit OrderedBarrier(int consumer) : consumer(consumer) {
    if (consumer == kConsumers - 1) arrive();  // consumer 0 begins
  }
  __device__ __forceinline__ void wait() const { cutlass::arch::NamedBarrier::sync(256, 4 + consumer); }
  __device__ __forceinline__ void arrive() const {
    cutlass::arch::NamedBarrier::arrive(256, 4 + (consumer == kConsumers - 1 ? 0 : consumer + 1));
  }
  // The last arrival is for a consumer that issues nothing any more: it must not stay pending.
  __device__ __forceinline__ void finish() const {
    if (consumer == 0) wait();
  }
};

// The softmax is of scale q k^T.
struct Scaling {
  float exponent;  // the factor of a score in the argument of exp2

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : exponent(p.scale * kLog2E) {}
};

// The softmax by rows, in base 2.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest, or the sum, of what the four lanes that share a row hold.
__device__ __forceinline__ float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// What a thread knows of its two rows. Sums are its own columns' only, until the end.
struct Rows {
  float maximum[2];  // of the scores so far, or up to kSlack less, as an exponent of 2
  float sum[2];
  float rescale[2];  // by how much what was summed before shrinks under the new maximum
};

// Turns scores into exp2(scale (score - maximum)) and takes note of maximum and sum. kMasked: a row may
// have met nothing but -inf so far, and its maximum must not become a NaN.
template <bool kFirst, bool kMasked>
__device__ __forceinline__ void softmax(float (&scores)[kScores], Rows& rows, float scale) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float maximum = fmaxf(scores[2 * r], scores[2 * r + 1]);
    CUTE_UNROLL
    for (int i = 4; i < kScores; i += 4) maximum =
        fmaxf(maximum, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
    if (!kFirst) maximum = fmaxf(maximum, rows.maximum[r]);
    maximum = quad_maximum(maximum);
    if (!kFirst && !((maximum - rows.maximum[r]) * scale > kSlack)) maximum = rows.maximum[r];
    const float reference = kMasked && maximum == minus_infinity() ? 0 : maximum, shift = reference * scale;
    rows.rescale[r] = kFirst ? 1 : fast_exp2((rows.maximum[r] - reference) * scale);  // exactly 1 where the maximum stays
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      float &x = scores[i + 2 * r], &y = scores[i + 2 * r + 1];
      x = fast_exp2(x * scale - shift);
      y = fast_exp2(y * scale - shift);
      sum += x + y;
    }
    rows.sum[r] = kFirst ? sum : rows.sum[r] * rows.rescale[r] + sum;
  }
}

constexpr int kQBytes = Tile<kWgmmaM>::kBytes, kStageBytes = Tile<kKvTile>::kBytes;

// What a warpgroup is to do next, from the producer: the KV tiles in places [begin, end) of its list, walked
// from the end of the list; those from `full_end` on have masks.
struct alignas(16) Work {
  int more;  // 0: nothing is left to do
  int row, head;
  Sequence sequence;
  int begin, end;
  int full_end;
  int list, masks;  // the list's number; that of its first mask
};

struct SharedStorage {
  alignas(1024) uint8_t q[kQStages][kConsumers][kQBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t k[kStages][kStageBytes];
  alignas(1024) uint8_t v[kStages][Values::kBytes];
  Work work[kQStages][kConsumers];  // guarded by q's barriers
  // The producer's bytes have arrived; every reader is done with them.
  FullBarrier q_full[kQStages][kConsumers], k_full[kStages], v_full[kStages];
  EmptyBarrier q_empty[kQStages][kConsumers], k_empty[kStages], v_empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 132096);

// ---- Producer: one thread keeps q, k and v coming -------------------------------------------------
// A piece of work, known before its turn: what its list says is read under the last loads of the piece before.
struct Listed {
  int4 header;  // how many tiles, how many whole, the first mask, which tile of rows
  int list, all_head, first;  // the list's number; the head's, of all batches; the tile that is walked first

  // Takes the next piece if there is one, in the order in which they are processed: by sections of heads whose
  // k and v fit L2 together; within one the longest lists of all its heads, then the next: lists lie in this
  // order.
  __device__ __forceinline__ bool take(const Parameters& p, Tiles& tiles) {
    int index;
    if (!tiles.next(p, index)) return false;
    const int section = index / (p.section * p.q_tiles), offset = index - section * p.section * p.q_tiles;
    const int heads = min(p.section, p.all_heads - section * p.section);
    all_head = section * p.section + offset % heads;
    const int batch = all_head / p.heads;
    list = batch * p.list_batch + (all_head - batch * p.heads) * p.list_head + offset / heads;
    header = p.lists[list];
    first = p.listed[int64_t(list) * p.list_tiles];
    return true;
  }
};

// Loads tile `n` of the k or v of a batch and head.
__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier (&full)[kStages],
                                     EmptyBarrier (&empty)[kStages], uint8_t (&tiles)[kStages][kStageBytes],
                                         Position at,
                                     int n, int batch, int head) {
  empty[at.stage].wait(at.phase);
  full[at.stage].arrive_and_expect_tx(kStageBytes);
  const auto columns = Sequence{batch}.columns_at<kKvTile>(n * kKvTile);
  Tile<kKvTile>::load(map, full[at.stage], kEvictLast, tiles[at.stage], columns, head);
}

__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, Position at, int n, int batch,
                                            int head) {
  shared.v_empty[at.stage].wait(at.phase);
  shared.v_full[at.stage].arrive_and_expect_tx(Values::kBytes);
  Values::load(p.v_map, shared.v_full[at.stage], shared.v[at.stage], Sequence{batch}, n * kKvTile, head);
}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared) {
  Tiles tiles;
  Position position{0, 1};  // a new barrier has completed the phase of parity 1: the first waits return
  PipelineState<kQStages> q{0, 1};
  Listed next;
  bool more = next.take(p, tiles), ahead = false;  // whether the first k is on its way already
  while (more) {
    const Listed now = next;
    const int batch = now.all_head / p.heads, q_head = now.all_head - batch * p.heads,
              head = q_head / p.sharing;
    const int count = now.header.x;
    const int* listed = p.listed + int64_t(now.list) * p.list_tiles;
    // In the order of use: S(n - 1) is issued before O += P(n) v, so that k is one tile ahead of v.
    if (count > 0 && !ahead)
      load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, now.first, batch, head);
    CUTE_NO_UNROLL
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = now.header.w * kQTile + consumer * kWgmmaM;
      FullBarrier& full = shared.q_full[q.stage][consumer];
      shared.q_empty[q.stage][consumer].wait(q.phase);
      shared.work[q.stage][consumer] = {1, row, q_head, {batch}, 0, count, now.header.y, now.list,
                                        now.header.z};
      full.arrive_and_expect_tx(kQBytes);  // releases the work too
      Tile<kWgmmaM>::load(p.q_map, full, kEvictFirst, shared.q[q.stage][consumer],
                          Sequence{batch}.rows_at<kWgmmaM>(row), q_head);
    }
    if (count == 0) more = next.take(p, tiles);
    ahead = false;
    int of_v = now.first;
    CUTE_NO_UNROLL
    for (int n = 1; n <= count; ++n) {
      const Position before = position;
      position.advance();
      if (n == max(1, count - 1)) more = next.take(p, tiles);  // not earlier: others may come to it first
      const int of_k = n < count ? listed[n] : 0;
      if (n < count) {
        load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, of_k, batch, head);
      } else if (more && next.header.x > 0) {  // the next piece's first
        const int next_batch = next.all_head / p.heads, next_head = next.all_head % p.heads / p.sharing;
        load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, next.first, next_batch, next_head);
        ahead = true;
      }
      load_values(p, shared, before, of_v, batch, head);
      of_v = of_k;
    }
    q.advance();
  }
  CUTE_NO_UNROLL
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    shared.q_empty[q.stage][consumer].wait(q.phase);
    shared.work[q.stage][consumer].more = 0;
    shared.q_full[q.stage][consumer].arrive();
  }
}

// ---- Consumer: scores, softmax, output of its 64 rows ---------------------------------------------
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

// Issues scores = q k^T; they run on while the warpgroup goes on.
__device__ __forceinline__ void multiply_scores(float (&scores)[kScores], uint64_t q, uint64_t k) {
  fence(scores);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDim / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(q + Tile<kWgmmaM>::columns(step), k + Tile<kKvTile>::columns(step), scores, step > 0);
  cute::warpgroup_commit_batch();
}

// Issues output += weights v: the MMAs of one KV tile.
__device__ __forceinline__ void multiply_output(float (&output)[kOutputs], const Weights& weights, uint64_t v) {
  fence(output);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvTile / OutputWgmma::kK; ++step)
    OutputWgmma::fma(weights[step], v + Values::keys(step), output, true);
  cute::warpgroup_commit_batch();
}

__device__ __forceinline__ void rescale(float (&output)[kOutputs], const Rows& rows) {
  // Only where the maximum of one of the warp's rows grew.
  if (!__any_sync(~0u, rows.rescale[0] != 1 || rows.rescale[1] != 1)) return;
  CUTE_UNROLL
  for (int i = 0; i < kOutputs; ++i) output[i] *= rows.rescale[i / 2 % 2];
}

// A thread's first row in its warpgroup's 64; the other is 8 below.
__device__ __forceinline__ int thread_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// What a consumer's steps work with, beside registers.
struct Consumer {
  const Parameters& p;
  SharedStorage& shared;
  int index;         // among the consumers
  uint64_t first_q, q, k, v;  // descriptors: of the first stages, and of the q that is worked on
  Scaling scaling;
  OrderedBarrier order;
  PipelineState<kQStages> at_q;
  Position position;
  int columns;       // of the sequence
  int row, column;   // the thread's first, in a tile
  int masks;         // the number of the mask of the tile in offset 0 of its list, if it had one

  // Of the tile before; its v is read one step later than its k.
  __device__ __forceinline__ Position before() const {
    const bool wraps = position.stage == 0;
    return {wraps ? kStages - 1 : position.stage - 1, position.phase ^ wraps};
  }
  // Waits for the next q, and with it for what is to be done.
  __device__ __forceinline__ Work await_work() {
    shared.q_full[at_q.stage][index].wait(at_q.phase);
    q = first_q + at_q.stage * (kConsumers * kQBytes / 16);
    return shared.work[at_q.stage][index];
  }
  __device__ __forceinline__ void release_q() const { release(shared.q_empty[at_q.stage][index]); }

  // The scores of a tile are there: k's stage is released.
  __device__ __forceinline__ void release_operands() const {
    release(shared.k_empty[position.stage]);
  }
  __device__ __forceinline__ uint64_t staged_k() const { return k + position.stage * (kStageBytes / 16); }
  __device__ __forceinline__ uint64_t staged_v(int stage) const { return v + stage * (Values::kBytes / 16); }
};

// Which of a thread's scores its rows attend to, from the mask of a tile: a bit for every row and column. It is
// on its way while the scores are multiplied.
struct Shown {
  static constexpr int kWords = kKvTile / 32;
  uint32_t words[2][kWords];  // of the thread's rows, the first bit being of its first column

  // Of the tile in offset n of its list, which has a mask where `masked`.
  __device__ __forceinline__ Shown(const Consumer& c, int n, bool masked) {
    if (!masked) return;
    const auto* mask =
        reinterpret_cast<const uint2*>(c.p.masks + ((int64_t(c.masks) + n) * kQTile + c.row) * kWords);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; i += 2) {
        const uint2 two = mask[(8 * r * kWords + i) / 2];
        words[r][i] = two.x >> c.column;
        words[r][i + 1] = two.y >> c.column;
      }
    }
  }

  // Hides the other scores.
  __device__ __forceinline__ void hide(float (&scores)[kScores]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int i = 0; i < kScores / 2; ++i) {
        const int offset = i / 2 * 8 + i % 2;
        if ((words[r][offset / 32] >> offset % 32 & 1) == 0)
          scores[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
      }
    }
  }
};

// The mainloop over KV tiles n, from the last to the first. S = q k^T and O += P v of two tiles are in flight together:
//   tensor core   S(n)  O += P(n + 1) v  S(n - 1)  O += P(n) v
//   this warp           softmax of S(n)            softmax of S(n - 1)
struct Steps {
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], Weights& weights,
                                               Rows& rows, int n, bool masked) {
    const Shown shown(c, n, masked);
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands();
    if (masked) shown.hide(scores);
    softmax<true, true>(scores, rows, c.scaling.exponent);
    c.position.advance();
    pack(weights, scores);
  }

  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              Weights& weights, Rows& rows, int n) {
    const Position before = c.before();
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    c.order.wait();
    multiply_scores(scores, c.q, c.staged_k());
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
    c.order.arrive();
    const Shown shown(c, n, kMasked);
    cute::warpgroup_wait<1>();  // the scores are there; the output's MMAs run on
    fence(scores);
    c.release_operands();
    if (kMasked) shown.hide(scores);
    softmax<false, kMasked>(scores, rows, c.scaling.exponent);
    c.position.advance();
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[before.stage]);
    pack(weights, scores);
    rescale(output, rows);
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights& weights) {
    const Position before = c.before();
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
  }
};

// ---- Epilogue: o and lse ----------------------------------------------------------------------------
// Transposes among the four lanes of a row: each has a pair of columns of every 8, and gets all four pairs of
// one 8: 16 bytes side by side, which it stores at once.
__device__ __forceinline__ uint4 gather(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? x0 : x1, 1), b = __shfl_xor_sync(~0u, odd ? x2 : x3, 1);
  (odd ? x0 : x1) = a;
  (odd ? x2 : x3) = b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? x0 : x2, 2), d = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

// Stores o and lse of the warpgroup's rows, from registers: nothing has to wait for staging that is still
// being read. A row that attends to nothing has sum 0: o 0, lse -inf.
__device__ __forceinline__ void store(const Consumer& c, const Work& work, const float (&output)[kOutputs],
                                      const Rows& rows) {
  const Sequence& sequence = work.sequence;
  const int lane = threadIdx.x % 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = work.row + thread_row() + 8 * r;
    const bool exists = row < sequence.rows(c.p);
    const float sum = quad_sum(rows.sum[r]), inverse = sum == 0 ? 0 : __fdividef(1, sum);
    if (exists && lane == 0)
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = (rows.maximum[r] * c.scaling.exponent + fast_log2(sum)) * kLn2;
    Element* o = c.p.o + lane * 8 +
                 sequence.row_at(c.p.o_batch_stride, c.p.o_head_stride, c.p.o_row_stride, work.head, row);
    CUTE_UNROLL
    for (int column = 0; column < kDimV; column += 32) {
      const float* x = output + column / 2 + 2 * r;
      const uint4 eight = gather(pair(x[0] * inverse, x[1] * inverse), pair(x[4] * inverse, x[5] * inverse),
                                 pair(x[8] * inverse, x[9] * inverse), pair(x[12] * inverse, x[13] * inverse));
      if (exists && column + lane * 8 < c.p.dim) *reinterpret_cast<uint4*>(o + column) = eight;
    }
  }
}

// ---- Mainloop -----------------------------------------------------------------------------------------
// Issues the first scores of a piece of work. Where it has no KV tile the MMA reads whatever is in the stage,
// and its result is not used: ptxas keeps MMAs asynchronous only where every path issues them.
__device__ __forceinline__ void begin(Consumer& c, float (&scores)[kScores], const Work& work) {
  const bool any = work.more && work.end > work.begin;
  if (any) {
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    c.order.wait();
  }
  multiply_scores(scores, c.q, c.staged_k());
  if (any) c.order.arrive();
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer) {
  const uint64_t first_q = matrix(shared.q[0][consumer], 0, 8 * kSpan, 1);
  const uint64_t k = matrix(shared.k[0], 0, 8 * kSpan, 1);
  const uint64_t v = Values::descriptor(shared.v[0]);
  Consumer c{p, shared, consumer, first_q, 0, k, v, Scaling(p), OrderedBarrier(consumer)};
  c.column = threadIdx.x % 4 * 2;
  float scores[kScores], output[kOutputs];
  Work work = c.await_work();
  begin(c, scores, work);
  while (work.more) {
    c.columns = work.sequence.columns(p);
    c.row = consumer * kWgmmaM + thread_row();
    c.masks = work.masks - work.full_end;
    Rows rows{ {minus_infinity(), minus_infinity()}, {0, 0}, {1, 1} };
    CUTE_UNROLL
    for (int i = 0; i < kOutputs; ++i) output[i] = 0;
    Work next;
    if (work.end > work.begin) {
      Weights weights;
      int n = work.end - 1;
      Steps::first(c, scores, weights, rows, n, n >= work.full_end);
      CUTE_NO_UNROLL
      for (--n; n >= work.full_end; --n) Steps::next<true>(c, scores, output, weights, rows, n);
      CUTE_NO_UNROLL
      for (; n >= work.begin; --n) Steps::next<false>(c, scores, output, weights, rows, n);
      const int stage = c.before().stage;
      Steps::last(c, output, weights);
      c.release_q();
      c.at_q.advance();
      next = c.await_work();
      // The next tile's first scores are multiplied while this tile's output is stored.
      begin(c, scores, next);
      cute::warpgroup_wait<1>();
      fence(output);
      release(c.shared.v_empty[stage]);
    } else {
      cute::warpgroup_wait<0>();
      c.release_q();
      c.at_q.advance();
      next = c.await_work();
      begin(c, scores, next);
    }
    store(c, work, output, rows);
    work = next;
  }
  cute::warpgroup_wait<0>();
  c.order.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_forward_sm90a_bf16_dim64_v128_blocks_128x128_overlap_pingpong_dynamic_rescale_needed_918b28fb(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q_map, &p.k_map, &p.v_map}) cute::prefetch_tma_descriptor(map);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (int i = 0; i < kQStages; ++i) {
        shared.q_full[i][consumer].init(1);
        shared.q_empty[i][consumer].init(4);
      }
    }
    for (int i = 0; i < kStages; ++i) {
      shared.k_full[i].init(1);
      shared.v_full[i].init(1);
      shared.k_empty[i].init(4 * kConsumers);
      shared.v_empty[i].init(4 * kConsumers);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  // Programmatic dependent launch: all above overlaps the previous grid, and touches no global memory.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1);
  }
}
