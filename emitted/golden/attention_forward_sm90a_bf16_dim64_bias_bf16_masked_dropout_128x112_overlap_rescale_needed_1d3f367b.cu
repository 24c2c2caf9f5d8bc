// attention_forward_sm90a_bf16_dim64_bias_bf16_masked_dropout_128x112_overlap_rescale_needed_1d3f367b
//
// o = softmax(s) v by rows, lse = log(sum(exp(s))), s = scale q k^T
//   bf16, head dimension 64, mask none, fixed lengths
//   q tile 128, KV tile 112, 2 consumers, 2 stages, overlap, scheduler static
// Weights are dropped behind the softmax, the others divided by p.keep.
// Digest 1d3f367b1bc138452f730d5428d940cfcb42fc785d50f1e111b91d66f4165580; `warploom show` prints this file.
//
// Launch: 384 threads, 1 CTA per SM; grid: one CTA per SM, to which tiles of q are dealt in advance
// Warpgroup 0, the producer: thread 0 issues the TMA loads of q, k and v; warps 1 to 3 make random bits for dropout
// Warpgroups 1 and 2, the consumers: scores, softmax and output of 64 rows of q each, by wgmma
//   Overlap: S(n) = q k^T and O += P(n + 1) v are in flight together, and the softmax
//   of S(n) runs under the latter; KV tiles n are visited from the last to the first
// Registers per thread: 168 at launch; setmaxnreg: producer 56, consumers 224 (56 + 2 * 224 <= 3 * 168)
//   A consumer thread needs about 196: 56 scores, 32 output, 28 weights in 16 bits, 80 others
// Shared memory: 140288 bytes; the launch asks for 140288 of 232448
//   q               2 stages * 2 consumers * 8192 = 32768
//   k               2 stages * 14336 = 28672
//   v               2 stages * 14336 = 28672
//   staging         8 warps * 5632 = 45056
//   words           a bit for each weight of the tiles = 4096
//   work, barriers  and padding = 1024
// Barriers        waited for by  guards                             a phase completes after
// q_full          its consumer   q and work of a consumer           1 arrival and the bytes of TMA
// q_empty         the producer   q until the last scores are there  4 arrivals: warps (consumer 0: 3 makers too)
// k_full, v_full  consumers      a stage until it is filled         1 arrival and the bytes of TMA
// k_empty         the producer   k until the scores are there       8 arrivals: consumer warps
// v_empty         the producer   v until the output is there        8 arrivals: consumer warps
// words_full      consumers      bits of a tile                     3 arrivals: warps that make bits
// words_empty     makers         bits until they are read           8 arrivals: consumer warps
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
using BiasElement = cutlass::bfloat16_t;
constexpr int kDim = 64, kSpan = 128;  // a tile is boxes of kSpan bytes a row
constexpr int kBoxColumns = kSpan / 2, kBoxes = kDim / kBoxColumns;
constexpr int kConsumers = 2;  // warpgroups with 64 rows of q each, beside a producer
constexpr int kWgmmaM = 64, kQTile = kWgmmaM * kConsumers, kKvTile = 112;
constexpr int kStages = 2, kQStages = 2;  // of k, of v; of q
constexpr float kSlack = 8;  // how far exponents of 2 may grow before the output is rescaled
constexpr int kScores = kKvTile / 2, kOutputs = kDim / 2;  // accumulators of a thread
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
  const cutlass::bfloat16_t* bias;  // [batch, head, row, column], by strides
  const uint8_t* shown;  // as bias, by strides
  int4* keys;  // [row of the mask]: see find_keys()
  int64_t* dropout_state;  // [2]: what is drawn for each position follows from it
  int64_t o_batch_stride;  // elements
  int64_t o_head_stride;  // elements
  int64_t o_row_stride;  // elements
  int64_t bias_batch;  // elements
  int64_t bias_head;  // elements
  int64_t bias_row;  // elements
  int64_t shown_batch;  // elements
  int64_t shown_head;  // elements
  int64_t shown_row;  // elements
  int32_t heads;  // query heads of one batch
  int32_t seq_q;  // rows
  int32_t seq_k;  // columns
  int32_t dim;  // of a head; at most kDim
  int32_t tiles;  // of all heads and batches
  int32_t q_tiles;  // of one head
  int32_t section;  // heads whose tiles are processed together
  int32_t all_heads;  // of all batches
  int32_t sharing;  // query heads of one kv head
  int32_t keys_rows;  // of the mask; 0: it is of pairs
  int32_t keys_columns;  // of the mask
  int32_t keys_batch;  // rows of a batch; 0: all have the same
  int32_t keys_head;  // rows of a head; 0: all have the same
  float scale;  // of dot products of q and k
  float keep;  // probability that a weight is kept, a multiple of 1 / 65536
};
static_assert(sizeof(Parameters) == 640);
static_assert(OFFSET(Parameters, q_map) == 0 && OFFSET(Parameters, k_map) == 128);
static_assert(OFFSET(Parameters, v_map) == 256 && OFFSET(Parameters, o) == 384);
static_assert(OFFSET(Parameters, lse) == 392 && OFFSET(Parameters, bias) == 400);
static_assert(OFFSET(Parameters, shown) == 408 && OFFSET(Parameters, keys) == 416);
static_assert(OFFSET(Parameters, dropout_state) == 424 && OFFSET(Parameters, o_batch_stride) == 432);
static_assert(OFFSET(Parameters, o_head_stride) == 440 && OFFSET(Parameters, o_row_stride) == 448);
static_assert(OFFSET(Parameters, bias_batch) == 456 && OFFSET(Parameters, bias_head) == 464);
static_assert(OFFSET(Parameters, bias_row) == 472 && OFFSET(Parameters, shown_batch) == 480);
static_assert(OFFSET(Parameters, shown_head) == 488 && OFFSET(Parameters, shown_row) == 496);
static_assert(OFFSET(Parameters, heads) == 504 && OFFSET(Parameters, seq_q) == 508);
static_assert(OFFSET(Parameters, seq_k) == 512 && OFFSET(Parameters, dim) == 516);
static_assert(OFFSET(Parameters, tiles) == 520 && OFFSET(Parameters, q_tiles) == 524);
static_assert(OFFSET(Parameters, section) == 528 && OFFSET(Parameters, all_heads) == 532);
static_assert(OFFSET(Parameters, sharing) == 536 && OFFSET(Parameters, keys_rows) == 540);
static_assert(OFFSET(Parameters, keys_columns) == 544 && OFFSET(Parameters, keys_batch) == 548);
static_assert(OFFSET(Parameters, keys_head) == 552 && OFFSET(Parameters, scale) == 556);
static_assert(OFFSET(Parameters, keep) == 560);

// ---- Device functions -----------------------------------------------------------------------
// D[64 x 112] += A[64 x 16] * B[16 x 112]; A and B by descriptor, D in registers.
struct ScoresWgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[56], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55}, %56, %57, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

// D[64 x 64] += A[64 x 16] * B[16 x 64]; A in registers, B by descriptor, D in registers.
struct OutputWgmma {
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
  // Where all batches have one bias they come one after the other, while L2 has it.
  const bool shared = p.bias_batch == 0;
  const int inner = shared ? p.all_heads / p.heads : p.heads, outer = all_head / inner,
            rest = all_head - outer * inner;
  const int batch = shared ? rest : outer, head = shared ? outer : rest;
  return { {batch}, head, tile * kQTile};
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

// Tiles are dealt in advance, there and back: who gets the longest of one round gets the shortest of the
// next. Where tiles differ in length each section is dealt by itself, and every second one from the other
// end: a round that ran on into the next section would give the same CTAs the long ones again.
struct Tiles {
  int round = 0;

  __device__ __forceinline__ bool next(const Parameters& p, int& index) {
    const int whole = p.tiles, rounds = (whole + gridDim.x - 1) / gridDim.x;
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

// The softmax is of scale q k^T.
// A score is multiplied by `factor`, and gets its bias in one rounding to fp32, before anything else: a row
// that a large finite bias hides then has the scores that torch's has, all alike, whose weights are alike too.
struct Scaling {
  static constexpr float exponent = kLog2E;  // the factor of a biased score in the argument of exp2
  float factor;                              // of a score before the bias is added

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : factor(p.scale) {}
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

// Hides what is beyond the `columns` of the sequence. wgmma gives a lane columns 2 (l % 4) and the next of
// every 8.
__device__ __forceinline__ void mask(float (&scores)[kScores], int columns, int column) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int end = columns - column;
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int offset = i / 2 * 8 + i % 2;
      if (offset >= end) scores[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
    }
  }
}

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
    const float reference = maximum == minus_infinity() ? 0 : maximum;
    rows.rescale[r] = kFirst ? 1 : fast_exp2((rows.maximum[r] - reference) * scale);  // exactly 1 where the maximum stays
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      float &x = scores[i + 2 * r], &y = scores[i + 2 * r + 1];
      // The difference is exact where both are large; their products with `scale` would be rounded by more than
      // 1.
      x = fast_exp2((x - reference) * scale);
      y = fast_exp2((y - reference) * scale);
      sum += x + y;
    }
    rows.sum[r] = kFirst ? sum : rows.sum[r] * rows.rescale[r] + sum;
  }
}

constexpr int kStagedRows = 16, kStagedColumns = kKvTile;  // of a warp
// What is added to scores, or hides them, before the softmax: a Score for a tile of a head.
//
// A bias of 16 bits and a mask come by shared memory: stage() begins to copy what a warp has of a tile,
// kStagedRows rows of kStagedColumns, while it works on the tile before; await() waits for them. A warp stages
// for itself alone: no other waits for it.
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

  // Elements of 16 bits of accumulators i to i + 7, by twos.
  __device__ __forceinline__ uint4 read_eight(int i) const {
    uint4 x;
    const int lane = threadIdx.x % 32;
    const uint32_t at = cute::cast_smem_ptr_to_uint(bytes);
    // Rows 0 and 8 of 8 columns, then of the next 8.
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at + lane % 16 * kPitch + lane / 16 * 16 + i / 8 * 32));
    return x;
  }

  // Bytes of accumulators i to i + 7, each in bits that are its own: 0 or not.
  __device__ __forceinline__ void read_bytes(uint32_t (&x)[8], int i) const {
    const int lane = threadIdx.x % 32;
    const uint32_t pair = lane % 4 * 0x22 + 0x10;  // of the bytes of 8 columns, the thread's two
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint4 row = *reinterpret_cast<const uint4*>(bytes + (lane / 4 + 8 * r) * kPitch + i / 8 * 16);
      const uint32_t left = __byte_perm(row.x, row.y, pair), right = __byte_perm(row.z, row.w, pair);
      x[2 * r] = left & 0xff, x[2 * r + 1] = left & 0xff00;
      x[2 * r + 4] = right & 0xff, x[2 * r + 5] = right & 0xff00;
    }
  }
};
struct Staging {
  alignas(16) Staged<2> bias;
  alignas(16) Staged<1> shown;
};

struct Score {
  const Staging& staging;
  struct Eight {
    uint32_t bias[8], shown[8];
  };

  // `row` and `column` are the thread's first in the sequence, of `head`.
  __device__ __forceinline__ Score(const Parameters& p, const Staging& staging, const Sequence& sequence,
                                   int head, int row, int column)
      : staging(staging)
  {
  }

  __device__ __forceinline__ static int64_t number_of(const Sequence& sequence) {
    return sequence.batch;
  }

  // `row` and `column` are the warp's first of the tile.
  __device__ __forceinline__ static void stage(const Parameters& p, Staging& staging, const Sequence& sequence,
                                               int head, int row, int column) {
    const int rows = sequence.rows(p) - row, columns = sequence.columns(p) - column;
    staging.bias.copy(p.bias + number_of(sequence) * p.bias_batch + head * p.bias_head + row * p.bias_row + column,
                      p.bias_row, rows, columns);
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
    const uint4 twos = staging.bias.read_eight(i);
    const uint32_t two[4] = {twos.x, twos.y, twos.z, twos.w};
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) eight.bias[j] = two[j / 2];
    staging.shown.read_bytes(eight.shown, i);
    return eight;
  }

  // What is added to the score of accumulator i.
  __device__ __forceinline__ float term(int i, const Eight& eight) const {
    const uint32_t two = eight.bias[i % 8];
    const float bias = float(BiasElement::bitcast(uint16_t(i % 2 ? two >> 16 : two)));
    return bias;
  }

  __device__ __forceinline__ bool hides(int i, const Eight& eight) const { return eight.shown[i % 8] == 0; }
};

// ---- Masks of keys: one row for all rows of q --------------------------------------------------------
// What a row shows: nothing outside of columns [begin, end), and all of these if `count` is as many.
struct Keys {
  int begin, end, count;

  // Adds the thread's part of a row of the mask.
  __device__ __forceinline__ void add(const uint8_t* shown, int columns) {
    CUTE_NO_UNROLL
    for (int column = threadIdx.x * 16; column < columns; column += blockDim.x * 16) {
      uint32_t words[4] = {0, 0, 0, 0};
      if (columns - column >= 16) {
        const uint4 sixteen = *reinterpret_cast<const uint4*>(shown + column);
        words[0] = sixteen.x, words[1] = sixteen.y, words[2] = sixteen.z, words[3] = sixteen.w;
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 15; ++i)
          if (column + i < columns) words[i / 4] |= uint32_t(shown[column + i]) << i % 4 * 8;
      }
      uint32_t bits = 0;  // of truth values, which are any number but 0
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) bits |= (__vsetne4(words[i], 0) * 0x10204080u >> 28) << 4 * i;
      if (bits == 0) continue;
      begin = min(begin, column + __ffs(bits) - 1);
      end = max(end, column + 32 - __clz(bits));
      count += __popc(bits);
    }
  }

  // Adds the warp's parts to the CTA's, which nobody reads before all have.
  __device__ __forceinline__ void join(Keys& block) const {
    const int first = __reduce_min_sync(~0u, begin), last = __reduce_max_sync(~0u, end);
    const int all = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 != 0) return;
    atomicMin(&block.begin, first);
    atomicMax(&block.end, last);
    atomicAdd(&block.count, all);
  }
};

// Finds what a row of the mask shows, by all threads of a CTA, for the next kernel to read: nothing outside of
// columns [x, y), and all of [z, w).
__device__ __forceinline__ void find_keys(const Parameters& p, int row) {
  __shared__ Keys keys;
  if (threadIdx.x == 0) keys = {p.keys_columns, 0, 0};
  __syncthreads();
  const int batch = p.keys_batch == 0 ? 0 : row / p.keys_batch, head = row - batch * p.keys_batch;
  Keys own{p.keys_columns, 0, 0};
  own.add(p.shown + batch * p.shown_batch + head * p.shown_head, p.keys_columns);
  own.join(keys);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int begin = min(keys.begin, keys.end);
  p.keys[row] = make_int4(begin, keys.end, begin, keys.count == keys.end - begin ? keys.end : begin);
}

// What the row of a query head shows.
__device__ __forceinline__ int4 keys_of(const Parameters& p, int64_t number, int head) {
  return p.keys[int(number) * p.keys_batch + head * p.keys_head];
}

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
constexpr int kMakers = 3, kFirstMaker = 4 - kMakers, kWordStages = 2;

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

constexpr int kQBytes = Tile<kWgmmaM>::kBytes, kStageBytes = Tile<kKvTile>::kBytes;

// What a warpgroup is to do next, from the producer: KV tiles [begin, end), of which those in
// [begin, full_end) need no mask.
struct alignas(16) Work {
  int more;  // 0: nothing is left to do
  int row, head;
  Sequence sequence;
  int begin, end;
  int full_end;
};

struct SharedStorage {
  alignas(1024) uint8_t q[kQStages][kConsumers][kQBytes];  // swizzled rows: a tile starts at 1024 bytes
  alignas(1024) uint8_t k[kStages][kStageBytes];
  alignas(1024) uint8_t v[kStages][kStageBytes];
  Staging staging[4 * kConsumers];  // of each warp
  Work work[kQStages][kConsumers];  // guarded by q's barriers
  uint4 words[kWordStages][kConsumers * 4 * kKvTile / 16][2];  // of a warp's rows, 16 columns after the other
  Dropout::Shared dropout[kMakers];
  EmptyBarrier words_full[kWordStages], words_empty[kWordStages];
  // The producer's bytes have arrived; every reader is done with them.
  FullBarrier q_full[kQStages][kConsumers], k_full[kStages], v_full[kStages];
  EmptyBarrier q_empty[kQStages][kConsumers], k_empty[kStages], v_empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 140288);

// ---- Producer: one thread keeps q, k and v coming -------------------------------------------------
// The tile called `index`, in the order in which tiles are processed: head by head.
__device__ __forceinline__ Work locate(const Parameters& p, int index) {
  const int section = index / (p.section * p.q_tiles), offset = index - section * p.section * p.q_tiles;
  const int tile = offset % p.q_tiles, all_head = section * p.section + offset / p.q_tiles;
  const auto [sequence, head, row] = tile_coord(p, tile, all_head);
  // Where the mask is of pairs any key may be shown, and any hidden.
  const int all_columns = sequence.columns(p);
  const int4 keys = p.shown_row == 0 ? keys_of(p, Score::number_of(sequence), head)
      : make_int4(0, all_columns, 0, 0);
  const int columns = min(all_columns, keys.y);
  const int end = columns;
  const int begin = max(0, min(end, max(0, keys.x)));
  return {1, row, head, sequence, begin / kKvTile, (end + kKvTile - 1) / kKvTile};
}

// The share of one warpgroup, whose rows begin at `row`.
__device__ __forceinline__ Work share(const Parameters& p, Work work, int row) {
  work.row = row;
  const int columns = work.sequence.columns(p);
  work.full_end = max(work.begin, columns / kKvTile);
  return work;
}

__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier& full, EmptyBarrier& empty,
                                     uint32_t phase, uint8_t* tile, const Sequence& sequence, int n, int head) {
  empty.wait(phase);
  full.arrive_and_expect_tx(kStageBytes);
  Tile<kKvTile>::load(map, full, kEvictLast, tile, sequence.columns_at<kKvTile>(n * kKvTile), head);
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
      load(p.v_map, shared.v_full[before.stage], shared.v_empty[before.stage], before.phase, shared.v[before.stage],
           work.sequence, n, head);
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

// ---- Makers of words: ahead of the consumers, for every KV tile that the CTA walks ---------------------
__device__ __forceinline__ void make(const Parameters& p, SharedStorage& shared) {
  constexpr int kPatches = kKvTile / 16;
  const Dropout dropout(p, shared.dropout[threadIdx.x / 32 - kFirstMaker]);
  PipelineState<kWordStages> at{0, 1};
  int turn = threadIdx.x / 32 - kFirstMaker;
  for (PipelineState<kQStages> q{0, 0};; q.advance()) {
    shared.q_full[q.stage][0].wait(q.phase);
    const Work& work = shared.work[q.stage][0];
    const int more = work.more, begin = work.begin, end = work.end;
    const uint32_t head = work.sequence.batch * p.heads + work.head, rows = work.row / 16;
    release(shared.q_empty[q.stage][0]);
    if (!more) return;
    CUTE_NO_UNROLL
    for (int n = end - 1; n >= begin; --n) {
      shared.words_empty[at.stage].wait(at.phase);
      make_words(shared.words[at.stage], dropout, head, turn, [&](int i) {
        return make_uint2(rows + i / kPatches, n * kPatches + i % kPatches);
      });
      release(shared.words_full[at.stage]);
      at.advance();
    }
  }
}

// Of 16 columns after the other, of which a thread has 8 weights by the sign bits of bytes, and the bits below.
using Words = uint32_t[kKvTile / 16];

// Masks of pairs of weights side by side that are dropped, by the sign bits of two bytes of a word.
__device__ __forceinline__ void expand(Weights& dropped, const Words& words) {
  CUTE_UNROLL
  for (int i = 0; i < kKvTile / 4; ++i)  // not by __byte_perm(), which knows no signs
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(dropped[i / 4][i % 4]) : "r"(words[i / 4] << i % 4 / 2), "r"(i % 2 ? 0xbbaa : 0x9988));
}
// Weights, with 0 for those that are dropped.
__device__ __forceinline__ void keep(Weights& weights, const Weights& packed, const Weights& dropped) {
  CUTE_UNROLL
  for (int i = 0; i < kKvTile / 4; ++i) weights[i / 4][i % 4] = packed[i / 4][i % 4] & ~dropped[i / 4][i % 4];
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
    OutputWgmma::fma(weights[step], v + step * OutputWgmma::kK * kSpan / 16, output, true);
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
  PipelineState<kQStages> at_q;
  Position position;
  int begin;         // the leftmost KV tile, which comes last
  int columns;       // of the sequence
  int column;        // the thread's first in a tile
  Sequence sequence;
  int head, own_row;  // the thread's first row as it is
  PipelineState<kWordStages> at_words;

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
  __device__ __forceinline__ uint64_t staged_v(int stage) const { return v + stage * (kStageBytes / 16); }

  __device__ __forceinline__ Staging& staging() const { return shared.staging[index * 4 + threadIdx.x / 32 % 4]; }
  // Begins to copy what changes the scores of tile n, of rows from the warp's first on.
  __device__ __forceinline__ void stage(const Sequence& sequence, int head, int row, int n) const {
    Score::stage(p, staging(), sequence, head, row, n * kKvTile);
  }
  // Changes the scores of tile n.
  __device__ __forceinline__ void change(float (&scores)[kScores], int n) const {
    const Score score(p, staging(), sequence, head, own_row, n * kKvTile + column);
    Score::await();
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 8) {
      const Score::Eight eight = score.read(i);
      CUTE_UNROLL
      for (int j = i; j < i + 8; ++j)
        scores[j] = score.hides(j, eight) ? minus_infinity() : fmaf(scores[j], scaling.factor, score.term(j, eight));
    }
    __syncwarp();  // all lanes have read what is staged, before one copies the next tile's there
    if (n > begin) stage(sequence, head, own_row - int(threadIdx.x) % 32 / 4, n - 1);
  }

  // Reads which weights of the next tile are dropped.
  __device__ __forceinline__ void take(Words& words) {
    const int lane = threadIdx.x % 32, patches = (index * 4 + threadIdx.x / 32 % 4) * (kKvTile / 16);
    const auto* own = reinterpret_cast<const uint32_t(*)[8]>(shared.words[at_words.stage] + patches);
    shared.words_full[at_words.stage].wait(at_words.phase);
    CUTE_UNROLL
    for (int i = 0; i < kKvTile / 16; ++i)
      words[i] = own[i][lane / 8 * 2 + lane % 4 / 2] << (lane / 4 % 2 * 4 + lane % 2 * 2);
    release(shared.words_empty[at_words.stage]);
    at_words.advance();
  }
};

// The mainloop over KV tiles n, from the last to the first. S = q k^T and O += P v of two tiles are in flight together:
//   tensor core   S(n)  O += P(n + 1) v  S(n - 1)  O += P(n) v
//   this warp           softmax of S(n)            softmax of S(n - 1)
struct Steps {
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], Weights& weights,
                                               Rows& rows, int n, bool masked) {
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands();
    c.change(scores, n);
    if (masked) mask(scores, c.columns, n * kKvTile + c.column);
    softmax<true, true>(scores, rows, c.scaling.exponent);
    Words words;
    c.take(words);
    c.position.advance();
    pack(weights, scores);
    Weights dropped;
    expand(dropped, words);
    keep(weights, weights, dropped);
  }

  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              Weights& weights, Rows& rows, int n) {
    const Position before = c.before();
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    multiply_scores(scores, c.q, c.staged_k());
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
    cute::warpgroup_wait<1>();  // the scores are there; the output's MMAs run on
    fence(scores);
    c.release_operands();
    c.change(scores, n);
    if (kMasked) mask(scores, c.columns, n * kKvTile + c.column);
    softmax<false, kMasked>(scores, rows, c.scaling.exponent);
    Words words;
    c.take(words);
    c.position.advance();
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[before.stage]);
    pack(weights, scores);
    Weights dropped;
    expand(dropped, words);
    keep(weights, weights, dropped);
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
    const float sum = quad_sum(rows.sum[r]), inverse = sum == 0 ? 0 : __fdividef(1, sum * c.p.keep);
    if (exists && lane == 0)
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = rows.maximum[r] + fast_log2(sum) * kLn2;
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
  if (any) c.stage(work.sequence, work.head, work.row + threadIdx.x / 32 % 4 * 16, work.end - 1);
  if (any) {
    c.shared.k_full[c.position.stage].wait(c.position.phase);
  }
  multiply_scores(scores, c.q, c.staged_k());
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer) {
  const uint64_t first_q = matrix(shared.q[0][consumer], 0, 8 * kSpan, 1);
  const uint64_t k = matrix(shared.k[0], 0, 8 * kSpan, 1);
  const uint64_t v = matrix(shared.v[0], Tile<kKvTile>::kBoxBytes, 8 * kSpan, 1);
  Consumer c{p, shared, consumer, first_q, 0, k, v, Scaling(p)};
  c.column = threadIdx.x % 4 * 2;
  float scores[kScores], output[kOutputs];
  Work work = c.await_work();
  begin(c, scores, work);
  while (work.more) {
    c.begin = work.begin;
    c.columns = work.sequence.columns(p);
    c.sequence = work.sequence;
    c.head = work.head;
    c.own_row = work.row + thread_row();
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
}

// Before the main kernel: a CTA for each row of a mask of keys.
extern "C" __global__ void __launch_bounds__(256)
    attention_forward_sm90a_bf16_dim64_bias_bf16_masked_dropout_128x112_overlap_rescale_needed_1d3f367b_keys(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  find_keys(p, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    attention_forward_sm90a_bf16_dim64_bias_bf16_masked_dropout_128x112_overlap_rescale_needed_1d3f367b(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q_map, &p.k_map, &p.v_map}) cute::prefetch_tma_descriptor(map);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (int i = 0; i < kQStages; ++i) {
        shared.q_full[i][consumer].init(1);
        shared.q_empty[i][consumer].init(4 + (consumer == 0) * kMakers);
      }
    }
    for (int i = 0; i < kWordStages; ++i) {
      shared.words_full[i].init(kMakers);
      shared.words_empty[i].init(4 * kConsumers);
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
    cutlass::arch::warpgroup_reg_dealloc<56>();
    if (threadIdx.x == 0) produce(p, shared);
    if (threadIdx.x / 32 >= kFirstMaker) make(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<224>();
    consume(p, shared, warpgroup - 1);
  }
}
