// sparse_gemm_sm90a_bf16_bias_silu_2x1x32_stages8_a4219a98
//
// y = silu(x W' + bias), bf16, W 2:4 sparse
//   128 rows of W by 32 of x a tile, 2 consumers, 8 stages
// Digest a4219a986d8f1f229489ea67fdb1d6ebbc8c3e45b46f4fcf60fff69ac0c0637c; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 to 2, 2 consumers: wgmma.sp on 64 rows of W, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 <= 3 * 168).
//   A consumer thread has 16 accumulators.
// Shared memory: 115840 bytes; the launch asks for 116736 of 232448
//   tokens       8 stages * 32 rows * 128 = 32768
//   values       8 stages * 128 rows * 64 = 65536
//   metadata     8 stages * 1024 = 8192
//   staging      2 consumers * 32 tokens * 144 = 9216
//   full, empty  8 stages * 2 * 8 = 128
// Barriers      waited for by    guards                       a phase completes after
// full          consumers        a stage until it is filled   1 arrival and the stage's bytes
// empty         the producer     a stage while it is read     8 arrivals: every consumer warp
// named 1 to 2  all that arrive  its staging buffer           128 threads of a consumer
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

using Output = cutlass::bfloat16_t;
using Sum = float;
constexpr int kConsumers = 2, kBlocks = 1;  // blocks of 64 rows in a consumer
constexpr int kTokens = 32, kStages = 8;
constexpr int kTileK = 64;  // columns of W in a stage: 64 bytes of values, 128 of x
constexpr int kRows = 64 * kConsumers * kBlocks, kRowBlocks = kRows / 64;
constexpr int kCount = kTokens / 2;  // accumulators of a thread in 64 rows
constexpr int kValuesBytes = kRows * 64, kTokensBytes = kTokens * 128;
constexpr int kWordBytes = 128 * 4;  // metadata of 64 rows and 64 columns: a 32-bit word for each thread
constexpr int kWords = 1, kWordsBytes = kWords * kWordBytes;  // a thread's words for 64 rows of a stage
constexpr int kChunk = 32, kPitch = 144;  // staged tokens, and bytes between them (16 against bank conflicts)
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor x_map;  // x [m, k]
  cute::TmaDescriptor values_map;  // values of W [n, k / 2]
  cute::TmaDescriptor metadata_map;  // words [n / 64, k / 64, 128]
  cutlass::bfloat16_t* y;  // [m][y_pitch]
  const cutlass::bfloat16_t* bias;  // [n]
  int64_t y_pitch;  // elements between rows of y
  int32_t m;  // rows of x
  int32_t n;  // rows of W
  int32_t k_tiles;  // stages that k fills
};
static_assert(sizeof(Parameters) == 512);
static_assert(OFFSET(Parameters, x_map) == 0 && OFFSET(Parameters, values_map) == 128);
static_assert(OFFSET(Parameters, metadata_map) == 256 && OFFSET(Parameters, y) == 384);
static_assert(OFFSET(Parameters, bias) == 392 && OFFSET(Parameters, y_pitch) == 400);
static_assert(OFFSET(Parameters, m) == 408 && OFFSET(Parameters, n) == 412);
static_assert(OFFSET(Parameters, k_tiles) == 416);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

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

// Releases a stage that this warp has read by ld.shared. The proxy fence orders these generic reads before the writes
// of the next TMA load: without it TMA was seen to overwrite the end of a stage, where processes share a GPU in turns.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

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

struct Shared {
  alignas(1024) uint8_t tokens[kStages][kTokensBytes];
  alignas(1024) uint8_t values[kStages][kValuesBytes];
  alignas(128) uint8_t metadata[kStages][kRowBlocks * kWordsBytes];
  alignas(128) uint8_t staging[kConsumers][kChunk * kPitch];  // y of 64 rows of W, by tokens
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};
static_assert(sizeof(Shared) <= 116736);

// D[64 x 32] += W[64 x 32] * x'. The instruction takes metadata from two of every four threads:
// kSelector says which, so that one word serves two instructions.
template <int kSelector>
__device__ __forceinline__ void multiply(Sum (&sums)[kCount], uint64_t values, uint64_t tokens, uint32_t word,
                                         int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %20, 0;\n"
      "wgmma.mma_async.sp.sync.aligned.m64n32k32.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, %18, %19, add, 1, 1, 0, 0;\n}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), 
"+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), 
"+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), 
"+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
: "l"(values), "l"(tokens), "r"(word), "n"(kSelector), "r"(add));
}

// Keeps metadata in its registers until the wgmma that read it are done. ptxas reuses a register once the last
// instruction that reads it is issued, but wgmma reads metadata while it runs. The store never executes (k_tiles is
// at least 1), which ptxas cannot know.
__device__ __forceinline__ void keep(const uint32_t (&words)[kBlocks][kWords], int k_tiles, const void* shared) {
  if (k_tiles > 0) return;
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kWords; ++i)
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
                 "r"(words[i / kWords][i % kWords])
                 : "memory");
}

// The tile scheduler: rows of the grid of tiles are rows of W, and its columns are tokens.
struct TileScheduler {
  int rows, columns, tiles;

  __device__ __forceinline__ explicit TileScheduler(const Parameters& p)
      : rows((p.n + kRows - 1) / kRows), columns((p.m + kTokens - 1) / kTokens), tiles(rows * columns) {}

  // The first row of W and the first token of a tile.
  __device__ __forceinline__ void at(int index, int& first_row, int& first_token) const {
    // Tiles are taken in bands of kSwizzle rows, each column by column, so that the operands of tiles in flight
    // stay in L2. In a band of 2 rows the order is 0 2 4 over 1 3 5.
    const int band = index / (kSwizzle * columns);
    const int width = min(rows - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * columns;
    const int row = band * kSwizzle + offset % width, column = offset / width;
    first_row = row * kRows;
    first_token = column * kTokens;
  }
};

__device__ __forceinline__ void produce(const Parameters& p, Shared& shared) {
  const TileScheduler scheduler(p);
  const int row_blocks = (p.n + 63) / 64;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = blockIdx.x; tile < scheduler.tiles; tile += gridDim.x) {
    int row, token;
    scheduler.at(tile, row, token);
    CUTE_NO_UNROLL
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase);
      shared.full[stage].arrive_and_expect_tx(kValuesBytes + kTokensBytes + kRowBlocks * kWordsBytes);
      auto* barrier = reinterpret_cast<uint64_t*>(&shared.full[stage]);
      cute::SM90_TMA_LOAD_2D::copy(&p.values_map, barrier, kEvictNormally, shared.values[stage], k_tile * (kTileK / 2),
                                   row);
      cute::SM90_TMA_LOAD_2D::copy(&p.x_map, barrier, kEvictNormally, shared.tokens[stage], k_tile * kTileK, token);
      CUTE_UNROLL
      for (int block = 0; block < kRowBlocks; ++block) {
        // Rows past the end have values of 0; their metadata must be valid all the same: that of the last block.
        const int from = min(row / 64 + block, row_blocks - 1);
        cute::SM90_TMA_LOAD_3D::copy(&p.metadata_map, barrier, kEvictNormally,
                                     shared.metadata[stage] + block * kWordBytes, 0, k_tile, from);
      }
      position.advance();
    }
  }
}

// Stores y of 64 rows of W through shared memory, so that a token's elements are written contiguously.
__device__ __forceinline__ void store(const Parameters& p, uint8_t* staging, Sum (&sums)[kCount], int row, int token,
                                      int consumer) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool vectors = (reinterpret_cast<uintptr_t>(p.y) | uint64_t(p.y_pitch) * sizeof(Output)) % 16 == 0;
  const int own = row + warp * 16 + lane / 4;  // and 8 below
  const float upper = own < p.n ? float(p.bias[own]) : 0.f, lower = own + 8 < p.n ? float(p.bias[own + 8]) : 0.f;
  CUTE_UNROLL
  for (int chunk = 0; chunk < kTokens; chunk += kChunk) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");  // all threads have read the previous chunk
    CUTE_UNROLL
    for (int f = 0; f < kChunk / 8; ++f) {
      const Sum* sum = &sums[(chunk / 8 + f) * 4];
      float x[2][2] = { {float(sum[0]) + upper, float(sum[1]) + upper},
                        {float(sum[2]) + lower, float(sum[3]) + lower}};
      Silu().apply(x);
      uint32_t pairs[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        cutlass::Array<Output, 2> pair;
        pair[0] = Output(x[half][0]);
        pair[1] = Output(x[half][1]);
        pairs[half] = reinterpret_cast<const uint32_t&>(pair);
      }
      // 16 rows by 8 tokens, transposed by stmatrix: the rows of one token become adjacent.
      const uint32_t to = cute::cast_smem_ptr_to_uint(staging) + (f * 8 + lane % 8) * kPitch + warp * 32 + lane / 8 % 2 * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };" ::"r"(to), "r"(pairs[0]),
                   "r"(pairs[1])
                   : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
    CUTE_NO_UNROLL
    for (int piece = thread; piece < kChunk * 8; piece += 128) {
      const int at = token + chunk + piece / 8, first = row + piece % 8 * 8;
      if (at >= p.m || first >= p.n) continue;
      const uint8_t* from = staging + piece / 8 * kPitch + piece % 8 * 16;
      Output* y = p.y + at * p.y_pitch + first;
      if (vectors && first + 8 <= p.n) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < min(8, p.n - first); ++i) y[i] = reinterpret_cast<const Output*>(from)[i];
      }
    }
  }
}

__device__ __forceinline__ void consume(const Parameters& p, Shared& shared, int consumer) {
  const TileScheduler scheduler(p);
  const int thread = threadIdx.x % 128;
  Position position{0, 0};
  for (int tile = blockIdx.x; tile < scheduler.tiles; tile += gridDim.x) {
    int row, token;
    scheduler.at(tile, row, token);
    Sum sums[kBlocks][kCount];
    int previous = 0;  // the stage that wgmma may still read
    const auto multiply_stage = [&](int k_tile, uint32_t (&words)[kBlocks][kWords],
                                    const uint32_t (&others)[kBlocks][kWords]) {
      const int stage = position.stage;
      shared.full[stage].wait(position.phase);
      const auto* metadata = reinterpret_cast<const uint32_t*>(shared.metadata[stage]) + thread;
      CUTE_UNROLL
      for (int i = 0; i < kBlocks * kWords; ++i)
        words[i / kWords][i % kWords] = metadata[(consumer * kBlocks * kWords + i) * 128];
      const uint64_t values = matrix(shared.values[stage] + consumer * kBlocks * 64 * 64, 0, 512, 2);
      const uint64_t tokens = matrix(shared.tokens[stage], 0, 1024, 1);
      cute::warpgroup_arrive();
      // A step is 32 bytes of values and 64 bytes of tokens; descriptors count 16 bytes.
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        multiply<0>(sums[block], values + block * (64 * 64 / 16), tokens, words[block][0], k_tile != 0);
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        multiply<1>(sums[block], values + block * (64 * 64 / 16) + 2, tokens + 4, words[block][kWords - 1], 1);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      keep(others, p.k_tiles, shared.staging);
      if (k_tile != 0) release_read(shared.empty[previous]);
      previous = stage;
      position.advance();
    };
    // Metadata of two stages: wgmma of the previous stage may still read its own.
    uint32_t even[kBlocks][kWords] = {}, odd[kBlocks][kWords] = {};
    int k_tile = 0;
    CUTE_NO_UNROLL
    while (true) {
      multiply_stage(k_tile, even, odd);
      if (++k_tile == p.k_tiles) break;
      multiply_stage(k_tile, odd, even);
      if (++k_tile == p.k_tiles) break;
    }
    cute::warpgroup_wait<0>();
    keep(even, p.k_tiles, shared.staging);
    keep(odd, p.k_tiles, shared.staging);
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(sums[block][i]);
    release_read(shared.empty[previous]);
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      store(p, shared.staging[consumer], sums[block], row + (consumer * kBlocks + block) * 64, token, consumer);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (1 + kConsumers), 1)
    sparse_gemm_sm90a_bf16_bias_silu_2x1x32_stages8_a4219a98(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&p.values_map);
    cute::prefetch_tma_descriptor(&p.x_map);
    cute::prefetch_tma_descriptor(&p.metadata_map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(4 * kConsumers);  // a warp each
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_grid();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1);
  }
}
