// attention_forward_sm90a_bf16_dim256_window_scores_e4m3_weights_e4m3_sums_fast_128x96_pingpong_rescale_needed_c23c1da6
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = scale q k^T
//   bf16, q and k e4m3, v e4m3, head dimension 256, mask window, fixed lengths
//   q tile 128, KV tile 96, 2 consumers, 2 stages, pingpong, scheduler static
// Digest c23c1da62e706e1c8e0888b67c48b25b6ef4d4fe07b267bcd28149debfd76776; `warploom show` prints this file.
//
// Launch: 384 threads, 1 CTA per SM; grid: one CTA per SM, to which tiles of q are dealt in advance
// Warpgroup 0, the producer: thread 0 issues the TMA loads of q, k and v
// Warpgroups 1 and 2, the consumers: scores, softmax and output of 64 rows of q each, by wgmma
//   Ping-pong: consumers issue wgmma in turns; one's softmax runs under another's MMAs
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 <= 3 * 168)
//   A consumer thread needs about 220: 48 scores, 128 output, 12 weights in 8 bits, 32 others
// Shared memory: 164864 bytes; the launch asks for 164864 of 232448
//   q               2 stages * 2 consumers * 16384 = 65536
//   k               2 stages * 24576 = 49152
//   v               2 stages * 24576 = 49152
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
constexpr int kDim = 256, kSpan = 128;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan, kBoxes = kDim / kBoxColumns;
constexpr int kValueSpan = 32;  // of a row of v's boxes
constexpr int kConsumers = 2;  // warpgroups with 64 rows of q each, beside a producer
constexpr int kWgmmaM = 64, kQTile = kWgmmaM * kConsumers, kKvTile = 96;
constexpr int kStages = 2, kQStages = 2;  // of k, of v; of q
// Weights of e4m3 are up to 2^8, of its 448: what is small beside a row's largest is then rounded less coarsely.
constexpr float kOffset = 4;
constexpr float kSlack = 4;  // how far exponents of 2 may grow before the output is rescaled
constexpr int kScores = kKvTile / 2, kOutputs = kDim / 2;  // accumulators of a thread
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr auto kEvictLast = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Weights = uint32_t[kKvTile / 32][4];  // softmax's result in 8 bits, as wgmma takes it from registers

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor q_map;  // [dim, seq, head, batch], by 64 rows
  cute::TmaDescriptor k_map;  // [dim, seq, head, batch], by a kv tile
  cute::TmaDescriptor v_map;  // [dim, seq, head, batch], by a kv tile
  cutlass::bfloat16_t* o;  // as q, but for its strides
  float* lse;  // [batch, heads, seq_q]
  const float* q_descale;  // what q is multiplied by
  const float* k_descale;  // what k is
  const float* v_descale;  // what v is
  int64_t o_batch_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int64_t q_descale_batch;  // elements
  int64_t q_descale_head;  // elements
  int64_t k_descale_batch;  // elements
  int64_t k_descale_head;  // elements
  int64_t v_descale_batch;  // elements
  int64_t v_descale_head;  // elements
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t dim;  // of a head; at most kDim
  int32_t tiles;  // of all heads and batches
  int32_t q_tiles;  // of one head
  int32_t section;  // heads whose tiles are processed together
  int32_t all_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t left;  // row r sees no column before r - left
  int32_t right;  // row r sees no column after r + right
  float scale;  // of dot products of q and k
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, o) == 384);
static_assert(OFFSET(Parameters, lse) == 392 && OFFSET(Parameters, q_descale) == 400);
static_assert(OFFSET(Parameters, k_descale) == 408 && OFFSET(Parameters, v_descale) == 416);
static_assert(OFFSET(Parameters, o_batch_stride) == 424 && OFFSET(Parameters, o_head_stride) == 432);
static_assert(OFFSET(Parameters, o_row_stride) == 440 && OFFSET(Parameters, q_descale_batch) == 448);
static_assert(OFFSET(Parameters, q_descale_head) == 456 && OFFSET(Parameters, k_descale_batch) == 464);
static_assert(OFFSET(Parameters, k_descale_head) == 472 && OFFSET(Parameters, v_descale_batch) == 480);
static_assert(OFFSET(Parameters, v_descale_head) == 488 && OFFSET(Parameters, heads) == 496);
static_assert(OFFSET(Parameters, seq_q) == 500 && OFFSET(Parameters, seq_k) == 504);
static_assert(OFFSET(Parameters, dim) == 508 && OFFSET(Parameters, tiles) == 512);
static_assert(OFFSET(Parameters, q_tiles) == 516 && OFFSET(Parameters, section) == 520);
static_assert(OFFSET(Parameters, all_heads) == 524 && OFFSET(Parameters, sharing) == 528);
static_assert(OFFSET(Parameters, left) == 532 && OFFSET(Parameters, right) == 536);
static_assert(OFFSET(Parameters, scale) == 540);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 96] += A[64 x 32] * B[32 x 96]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[48], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 256] += A[64 x 32] * B[32 x 256]; A in registers, B by descriptor, D in registers.
struct OutputWgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[128], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, %132, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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

struct TileCoord {
  Sequence sequence;
  int head, row;
};

// Tile `tile` of p.q_tiles, the longest first, of a head counted through all batches.
__device__ __forceinline__ TileCoord tile_coord(const Parameters& p, int tile, int all_head) {
  const int batch = all_head / p.heads;
  return { {batch}, all_head - batch * p.heads, (p.q_tiles - 1 - tile) * kQTile };
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

// A stage of v, which lies dim-major in memory: boxes of kValueSpan keys side by side, a row for each index of
// the head dimension. Of 16 keys the place 4 t + u has key (u / 2) * 8 + 2 t + u % 2: accumulators of scores
// are wgmma's A as they are laid out then. Places past the last key are zeros.
struct Values {
  static constexpr int kBoxBytes = kDim * kValueSpan, kBytes = kKvTile / kValueSpan * kBoxBytes;

  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              const Sequence& sequence, int key, int head) {
    const int batch = sequence.batch;
    CUTE_NO_UNROLL  // the producer has few registers
    for (int i = 0; i < kKvTile / kValueSpan; ++i)
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictLast, tile + i * kBoxBytes,
                                   key + i * kValueSpan, 0, head, batch);
  }
  __device__ __forceinline__ static uint64_t descriptor(const uint8_t* tile) {
    return matrix(tile, 0, 8 * kValueSpan, 3);
  }

  // From the tile's start to where the 32 keys `step` begin, in a descriptor.
  __device__ __forceinline__ static constexpr int keys(int step) {
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

// Tiles are dealt in advance, there and back: who gets the longest of one round gets the shortest of the
// next. Where tiles differ in length each section is dealt by itself, and every second one from the other
// end: a round that ran on into the next section would give the same CTAs the long ones again.
struct Tiles {
  int round = 0;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    const int whole = p.section * p.q_tiles, rounds = (whole + gridDim.x - 1) / gridDim.x;
    for (;;) {
      const int section = round / rounds, turn = round - section * rounds, first = section * whole;
      if (first >= p.tiles) return false;
      const int offset = turn * gridDim.x + ((section + turn) % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      ++round;
      index = first + offset;
      if (offset < min(whole, p.tiles - first)) return true;
    }
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

// A score is a product of q and k times their scales.
struct Scaling {
  float exponent;  // the factor of a product in the argument of exp2

  // For the rows `row` and 8 below of a sequence and head.
  __device__ __forceinline__ void begin(const Parameters& p, const Sequence& sequence, int head, int row) {
    const float scale = p.scale * kLog2E;
    const int64_t batch = sequence.batch, kv_head = head / p.sharing;
    const float factor = scale * p.q_descale[batch * p.q_descale_batch + kv_head * p.q_descale_head] *
                         p.k_descale[batch * p.k_descale_batch + kv_head * p.k_descale_head];
    exponent = above_zero(factor);
  }
  // A masked score, -inf, must not become NaN where a scale is 0.
  __device__ __forceinline__ static float above_zero(float factor) { return factor == 0 ? 0x1p-126f : factor; }
  // Of a score of the thread's row r in the argument of exp2.
  __device__ __forceinline__ float factor(int) const {
    return exponent;
  }
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
  float maximum[2];  // of the scores so far, times their factor in the exponent, or up to kSlack less, as an exponent of 2
  float sum[2];
  float rescale[2];  // by how much what was summed before shrinks under the new maximum
};

// Hides the columns of a KV tile that rows do not attend to, of `columns` in the sequence. Bounds are relative
// to `row`. wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, and columns 2 (l % 4) and the next of
// every 8.
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, int columns, int row,
                                     int column) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int end = min(columns, row + 8 * r + p.right + 1) - column;
    const int begin = row + 8 * r - p.left - column;
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int offset = i / 2 * 8 + i % 2;
      if (offset >= end || offset < begin) scores[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
    }
  }
}

// Turns scores into exp2(factor score - maximum + kOffset) and takes note of maximum and sum. The maximum is one
// of exponents, since factors may differ from tile to tile. A row may have met nothing but -inf so far, and its maximum
// must not become a NaN.
__device__ __forceinline__ void softmax(float (&scores)[kScores], Rows& rows, const Scaling& scaling) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float factor = scaling.factor(r);
    float maximum = fmaxf(scores[2 * r], scores[2 * r + 1]);
    CUTE_UNROLL
    for (int i = 4; i < kScores; i += 4) maximum =
        fmaxf(maximum, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
    maximum = quad_maximum(fmaxf(maximum * factor, rows.maximum[r]));
    if (!(maximum - rows.maximum[r] > kSlack)) maximum = rows.maximum[r];
    const float reference = maximum == minus_infinity() ? 0 : maximum;
    const float shift = reference - kOffset;
    rows.rescale[r] = fast_exp2(rows.maximum[r] - reference);  // exactly 1 where the maximum stays
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      float &x = scores[i + 2 * r], &y = scores[i + 2 * r + 1];
      x = fast_exp2(x * factor - shift);
      y = fast_exp2(y * factor - shift);
      sum += x + y;
    }
    rows.sum[r] = rows.sum[r] * rows.rescale[r] + sum;
  }
}

constexpr int kQBytes = Tile<kWgmmaM>::kBytes, kStageBytes = Tile<kKvTile>::kBytes;

// What a warpgroup is to do next, from the producer: KV tiles [begin, end), of which those in
// [full_begin, full_end) need no mask.
struct alignas(16) Work {
  int more;  // 0: nothing is left to do
  int row, head;
  Sequence sequence;
  int begin, end;
  int full_begin, full_end;
  int skipped;  // tiles that the CTA loads before these, for rows further down
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
static_assert(sizeof(SharedStorage) <= 164864);

// ---- Producer: one thread keeps q, k and v coming -------------------------------------------------
// The tile called `index`, in the order in which tiles are processed: by sections of heads whose k and v fit
// L2 together; within one the longest tiles of all its heads, then the next.
__device__ __forceinline__ Work locate(const Parameters& p, int index) {
  const int section = index / (p.section * p.q_tiles), offset = index - section * p.section * p.q_tiles;
  const int heads = min(p.section, p.all_heads - section * p.section);
  const int tile = offset / heads, all_head = section * p.section + offset % heads;
  const auto [sequence, head, row] = tile_coord(p, tile, all_head);
  const int columns = sequence.columns(p);
  const int end = max(0, min(columns, min(row + kQTile, sequence.rows(p)) + p.right));
  const int begin = max(0, min(end, row - p.left));
  return {1, row, head, sequence, begin / kKvTile, (end + kKvTile - 1) / kKvTile};
}

// The share of one warpgroup, whose rows begin at `row`.
__device__ __forceinline__ Work share(const Parameters& p, Work work, int row) {
  work.row = row;
  const int columns = work.sequence.columns(p);
  const int full_end = max(0, min(columns, row + p.right + 1));
  work.full_end = max(work.begin, full_end / kKvTile);
  const int full_begin = max(0, row + kWgmmaM - 1 - p.left);
  work.full_begin = max(work.begin, (full_begin + kKvTile - 1) / kKvTile);
  // The last tiles may be for rows further down alone.
  const int end = min(columns, min(row + kWgmmaM, work.sequence.rows(p)) + p.right);
  work.skipped = work.end - max(work.begin, (end + kKvTile - 1) / kKvTile);
  work.end -= work.skipped;
  return work;
}

__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier& full, EmptyBarrier& empty,
                                     uint32_t phase, uint8_t* tile, const Sequence& sequence, int n, int head) {
  empty.wait(phase);
  full.arrive_and_expect_tx(kStageBytes);
  Tile<kKvTile>::load(map, full, kEvictLast, tile, sequence.columns_at<kKvTile>(n * kKvTile), head);
}

__device__ __forceinline__ void load_values(const Parameters& p, FullBarrier& full, EmptyBarrier& empty,
                                            uint32_t phase,
                                            uint8_t* tile, const Sequence& sequence, int n, int head) {
  empty.wait(phase);
  full.arrive_and_expect_tx(Values::kBytes);
  Values::load(p.v_map, full, tile, sequence, n * kKvTile, head);
}

__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared) {
  Tiles tiles;
  Position position{0, 1};  // a new barrier has completed the phase of parity 1: the first waits return
  PipelineState<kQStages> q{0, 1};
  for (int index; tiles.next(p, index);) {
    const Work work = locate(p, index);
    if (work.row < 0 || work.row >= work.sequence.rows(p)) continue;
    const int head = work.head / p.sharing;
    // In the order of use: S(n - 1) is issued before O += P(n) v, so that k is one tile ahead of v.
    if (work.end > work.begin)
      load(p.k_map, shared.k_full[position.stage], shared.k_empty[position.stage], position.phase,
           shared.k[position.stage], work.sequence, work.end - 1, head);
    CUTE_NO_UNROLL
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = work.row + consumer * kWgmmaM;
      FullBarrier& full = shared.q_full[q.stage][consumer];
      shared.q_empty[q.stage][consumer].wait(q.phase);
      shared.work[q.stage][consumer] = share(p, work, row);
      full.arrive_and_expect_tx(kQBytes);  // releases the work too
      Tile<kWgmmaM>::load(p.q_map, full, kEvictFirst, shared.q[q.stage][consumer],
                          work.sequence.rows_at<kWgmmaM>(row), work.head);
    }
    CUTE_NO_UNROLL
    for (int n = work.end - 1; n >= work.begin; --n) {
      const Position before = position;
      position.advance();
      if (n > work.begin)
        load(p.k_map, shared.k_full[position.stage], shared.k_empty[position.stage], position.phase,
             shared.k[position.stage], work.sequence, n - 1, head);
      load_values(p, shared.v_full[before.stage], shared.v_empty[before.stage], before.phase, shared.v[before.stage],
           work.sequence, n, head);
    }
    q.advance();
  }
  CUTE_NO_UNROLL
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    shared.q_empty[q.stage][consumer].wait(q.phase);
    shared.work[q.stage][consumer].more = shared.work[q.stage][consumer].skipped = 0;
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

// What a product is to overwrite: nothing is live in it until then.
template <int kCount> __device__ __forceinline__ void anything(float (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(accumulators[i])::"memory");
}

__device__ __forceinline__ uint32_t four(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Of each 16 keys a thread has, in a row, 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: A's columns 4 t to 4 t + 3, in v's
// order.
__device__ __forceinline__ void pack(Weights& weights, const float (&scores)[kScores]) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 8; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float* s = scores + i * 8 + 2 * r;
      weights[i / 2][i % 2 * 2 + r] = four(s[0], s[1], s[4], s[5]);
    }
  }
}

// Issues scores = q k^T; they run on while the warpgroup goes on.
__device__ __forceinline__ void multiply_scores(float (&scores)[kScores], uint64_t q, uint64_t k) {
  anything(scores);
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
  int row;           // the thread's first, as bounds are relative to it
  int column;        // the thread's first in a tile

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

  // Passes over a tile that the CTA loads for rows further down: takes its turn, and releases k and v.
  __device__ __forceinline__ void skip() {
    order.wait();
    order.arrive();
    shared.k_full[position.stage].wait(position.phase);
    release(shared.k_empty[position.stage]);
    shared.v_full[position.stage].wait(position.phase);
    release(shared.v_empty[position.stage]);
    position.advance();
  }
};

// Steps of the loop over KV tiles: the weights of a tile are multiplied with its v, and behind that the scores of the
// next one, under which nothing waits. Another warpgroup's MMAs run under the softmax.
struct Steps {
  // Scores that are there become weights.
  static __device__ __forceinline__ void weigh(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                               Weights& weights, Rows& rows, int n, bool masked) {
    if (masked) mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column);
    softmax(scores, rows, c.scaling);
    pack(weights, scores);
    rescale(output, rows);
  }

  // The scores of the first tile.
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], int n) {
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands();
  }

  // Tile n's weights and their product with v, and the scores of the tile before it, which is the next one.
  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              Weights& weights, Rows& rows, int n) {
    weigh(c, scores, output, weights, rows, n, kMasked);
    const Position at = c.position;
    c.position.advance();
    c.shared.v_full[at.stage].wait(at.phase);
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    c.order.wait();
    multiply_output(output, weights, c.staged_v(at.stage));
    multiply_scores(scores, c.q, c.staged_k());
    c.order.arrive();
    cute::warpgroup_wait<1>();
    fence(output);
    release(c.shared.v_empty[at.stage]);
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands();
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights& weights) {
    const Position at = c.position;
    c.position.advance();
    c.shared.v_full[at.stage].wait(at.phase);
    multiply_output(output, weights, c.staged_v(at.stage));
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
  const float value_scale = c.p.v_descale[sequence.batch * c.p.v_descale_batch + work.head / c.p.sharing * c.p.v_descale_head];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = work.row + thread_row() + 8 * r;
    const bool exists = row < sequence.rows(c.p);
    const float sum = quad_sum(rows.sum[r]), inverse = sum == 0 ? 0 : __fdividef(value_scale, sum);
    if (exists && lane == 0)
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = (rows.maximum[r] - kOffset + fast_log2(sum)) * kLn2;
    Element* o = c.p.o + lane * 8 +
                 sequence.row_at(c.p.o_batch_stride, c.p.o_head_stride, c.p.o_row_stride, work.head, row);
    CUTE_UNROLL
    for (int column = 0; column < kDim; column += 32) {
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

// Passes over the tiles that the CTA loads only for rows further down; they come first.
__device__ __forceinline__ void skip(Consumer& c, const Work& work) {
  CUTE_NO_UNROLL
  for (int i = 0; i < work.skipped; ++i) c.skip();
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer) {
  const uint64_t first_q = matrix(shared.q[0][consumer], 0, 8 * kSpan, 1);
  const uint64_t k = matrix(shared.k[0], 0, 8 * kSpan, 1);
  const uint64_t v = Values::descriptor(shared.v[0]);
  Consumer c{p, shared, consumer, first_q, 0, k, v, Scaling(), OrderedBarrier(consumer)};
  c.column = threadIdx.x % 4 * 2;
  float scores[kScores], output[kOutputs];
  Work work = c.await_work();
  skip(c, work);
  begin(c, scores, work);
  while (work.more) {
    c.columns = work.sequence.columns(p);
    c.row = work.row + thread_row();
    c.scaling.begin(p, work.sequence, work.head, work.row + thread_row());
    Rows rows{ {minus_infinity(), minus_infinity()}, {0, 0}, {1, 1} };
    CUTE_UNROLL
    for (int i = 0; i < kOutputs; ++i) output[i] = 0;
    Work next;
    if (work.end > work.begin) {
      Weights weights;
      int n = work.end - 1;
      Steps::first(c, scores, n);
      CUTE_NO_UNROLL
      for (; n > work.begin && n >= work.full_end; --n)
        Steps::next<true>(c, scores, output, weights, rows, n);
      CUTE_NO_UNROLL
      for (; n > work.begin && n >= work.full_begin; --n)
        Steps::next<false>(c, scores, output, weights, rows, n);
      CUTE_NO_UNROLL
      for (; n > work.begin; --n) Steps::next<true>(c, scores, output, weights, rows, n);
      Steps::weigh(c, scores, output, weights, rows, n, n >= work.full_end || n < work.full_begin);
      const int stage = c.position.stage;
      Steps::last(c, output, weights);
      c.release_q();
      c.at_q.advance();
      next = c.await_work();
      if (next.skipped == 0) {
        // The next tile's first scores are multiplied while this tile's output is stored.
        begin(c, scores, next);
        cute::warpgroup_wait<1>();
        fence(output);
        release(c.shared.v_empty[stage]);
      } else {  // what is skipped may be loaded to the stage of this tile's v, which must be released first
        cute::warpgroup_wait<0>();
        fence(output);
        release(c.shared.v_empty[stage]);
        skip(c, next);
        begin(c, scores, next);
      }
    } else {
      cute::warpgroup_wait<0>();
      c.release_q();
      c.at_q.advance();
      next = c.await_work();
      skip(c, next);
      begin(c, scores, next);
    }
    store(c, work, output, rows);
    work = next;
  }
  cute::warpgroup_wait<0>();
  c.order.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_forward_sm90a_bf16_dim256_window_scores_e4m3_weights_e4m3_sums_fast_128x96_pingpong_rescale_needed_c23c1da6(const __grid_constant__ Parameters p) {
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
