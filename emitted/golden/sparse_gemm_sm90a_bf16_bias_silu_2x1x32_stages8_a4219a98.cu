// sparse_gemm_sm90a_bf16_bias_silu_2x1x32_stages8_a4219a98
//
// y[m, n] = silu(x[m, k] W[n, k]' + bias), W 2:4 sparse along k
//   x bf16, W bf16, accumulated in fp32, y bf16
//   tile 32x128x64, 2 consumers, 8 stages, along_n, swizzle 8
//   computed as y' = W x': rows of wgmma.sp's tile are rows of W, its columns rows of x
// Digest a4219a986d8f1f229489ea67fdb1d6ebbc8c3e45b46f4fcf60fff69ac0c0637c; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads.
// Warpgroups 1 and 2, the consumers: wgmma.sp on 64 rows of W each, then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 <= 3 * 168).
//   A consumer thread has 16 accumulators, and 1 word of metadata for each of two k tiles in flight.
// Shared memory: 115840 bytes; the launch asks for 116736 of 232448
//   x            8 stages * 32 rows * 128 = 32768
//   values       8 stages * 128 rows * 64 = 65536
//   metadata     8 stages * 2 blocks of 64 rows * 512 = 8192
//   staging      2 consumers * 32 rows of y * 144 = 9216
//   full, empty  8 stages * 2 * 8 = 128
// Barriers    waited for by    guards                       a phase completes after
// full        consumers        a stage until it is filled   1 arrival and the stage's bytes
// empty       the producer     a stage while it is read     8 arrivals: every consumer warp
// named 1, 2  all that arrive  its staging buffer           128 threads of a consumer
// CTA         all that arrive  barriers before use          all threads
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
constexpr int kTileM = 32, kTileN = 128, kTileK = 64;
constexpr int kStages = 8, kConsumers = 2;  // consumer warpgroups
constexpr int kSwizzle = 8;  // columns of tiles in a band of the tile scheduler
constexpr int kBlockRows = 64;  // rows of W in one wgmma
constexpr int kBlocks = 1, kTileBlocks = kConsumers * kBlocks;  // blocks in a consumer, and in a tile
constexpr int kCount = kTileM / 2;  // accumulators of a thread in one block
constexpr int kXRow = 128, kValuesRow = 64;  // bytes of a row of x and of values of a row of W in one stage
constexpr int kXBytes = kTileM * kXRow, kValuesBytes = kTileN * kValuesRow;
constexpr int kWordBytes = 128 * 4;  // metadata of one block and 64 columns of W: a 32-bit word for each thread
constexpr int kWords = 1, kWordsBytes = kWords * kWordBytes;  // a thread's words for one block in a stage
constexpr int kChunkRows = 32;  // rows of y in one pass of the epilogue
constexpr int kStagingRow = 144;  // bytes between staged rows of y: 128, and 16 against bank conflicts
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

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 32] += A[64 x 32] * B[32 x 32]; sparse A and B by descriptor, metadata and D in registers.
struct Wgmma {
  template <int kSelector>
  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, uint32_t metadata,
                                             float (&d)[16], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %20, 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n32k32.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, %18, %19, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(metadata), "n"(kSelector), "r"(int(add)));
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

// A tile of y: the column and the row of its first element, which are a row of W and a row of x.
struct TileCoord { int n, m; };

// The tile scheduler.
struct Tiles {
  int columns, rows;

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : columns((p.n + kTileN - 1) / kTileN), rows((p.m + kTileM - 1) / kTileM) {}

  __device__ __forceinline__ int count() const { return columns * rows; }

  __device__ __forceinline__ TileCoord at(int index) const {
    // Tiles are taken in bands of kSwizzle columns, each row by row, so that the operands of tiles in flight
    // stay in L2. In a band of 2 columns the order is 0 1 over 2 3 over 4 5.
    const int band = index / (kSwizzle * rows);
    const int width = min(columns - band * kSwizzle, kSwizzle);  // the last band may be narrower
    const int offset = index - band * kSwizzle * rows;
    const int column = band * kSwizzle + offset % width, row = offset / width;
    return {column * kTileN, row * kTileM};
  }
};

// A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
__device__ __forceinline__ void fence(Accumulator (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
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

struct SharedStorage {
  alignas(1024) uint8_t x[kStages][kXBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t values[kStages][kValuesBytes];
  alignas(128) uint8_t metadata[kStages][kTileBlocks * kWordsBytes];
  alignas(128) uint8_t staging[kConsumers][kChunkRows * kStagingRow];  // y of one block
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer warp has read the stage
};
static_assert(sizeof(SharedStorage) <= 116736);

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared) {
  const Tiles tiles(p);
  const int blocks = (p.n + kBlockRows - 1) / kBlockRows;
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const TileCoord at = tiles.at(tile);
    CUTE_NO_UNROLL
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase);
      // Boxes count in full: what of them is past the end of x or of W, TMA fills with zeros.
      shared.full[stage].arrive_and_expect_tx(kXBytes + kValuesBytes + kTileBlocks * kWordsBytes);
      auto* barrier = reinterpret_cast<uint64_t*>(&shared.full[stage]);
      cute::SM90_TMA_LOAD_2D::copy(&p.values_map, barrier, kEvictNormally, shared.values[stage],
                                   k_tile * (kTileK / 2), at.n);
      cute::SM90_TMA_LOAD_2D::copy(&p.x_map, barrier, kEvictNormally, shared.x[stage], k_tile * kTileK, at.m);
      CUTE_UNROLL
      for (int block = 0; block < kTileBlocks; ++block) {
        // Zeros are no valid metadata: the two indices of a group of four columns must differ. So rows past the
        // last, whose values are 0, get the metadata of the last block.
        const int from = min(at.n / kBlockRows + block, blocks - 1);
        cute::SM90_TMA_LOAD_3D::copy(&p.metadata_map, barrier, kEvictNormally,
                                     shared.metadata[stage] + block * kWordBytes, 0, k_tile, from);
      }
      position.advance();
    }
  }
}

// ---- Epilogue: what follows the sums over k, and the store of y ------------------------------------------
// Stores what one block of W gives: 64 columns of y from n on, of the rows from m on. They are rows of the
// accumulators: stmatrix transposes them in the staging buffer, from which rows of y are written contiguously.
__device__ __forceinline__ void store(const Parameters& p, uint8_t* staging,
                                      const Accumulator (&accumulators)[kCount], int n, int m, int consumer) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool vectors = (reinterpret_cast<uintptr_t>(p.y) | uint64_t(p.y_pitch) * sizeof(ElementD)) % 16 == 0;
  const int upper = n + warp * 16 + lane / 4, lower = upper + 8;  // the rows of W of a thread's accumulators
  const float upper_bias = upper < p.n ? float(p.bias[upper]) : 0.f;
  const float lower_bias = lower < p.n ? float(p.bias[lower]) : 0.f;
  CUTE_UNROLL
  for (int chunk = 0; chunk < kTileM; chunk += kChunkRows) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");  // all have read the previous chunk
    CUTE_UNROLL
    for (int f = 0; f < kChunkRows / 8; ++f) {
      const Accumulator* sum = &accumulators[(chunk / 8 + f) * 4];  // of two rows of W by two rows of x
      float values[2][2] = { {float(sum[0]) + upper_bias, float(sum[1]) + upper_bias},
                             {float(sum[2]) + lower_bias, float(sum[3]) + lower_bias} };
      Silu().apply(values);
      uint32_t words[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        cutlass::Array<ElementD, 2> pair;
        pair[0] = ElementD(values[i][0]);
        pair[1] = ElementD(values[i][1]);
        words[i] = reinterpret_cast<const uint32_t&>(pair);
      }
      // Lanes 0 to 7 address 8 rows of y at the warp's first 8 columns, lanes 8 to 15 at the next 8.
      const uint32_t to = cute::cast_smem_ptr_to_uint(staging) + (f * 8 + lane % 8) * kStagingRow + warp * 32
                          + lane / 8 % 2 * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };" ::"r"(to), "r"(words[0]),
                   "r"(words[1]) : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");  // all have staged this chunk
    CUTE_NO_UNROLL
    for (int piece = thread; piece < kChunkRows * 8; piece += 128) {  // 8 elements of a row of y
      const int row = m + chunk + piece / 8, column = n + piece % 8 * 8;
      if (row >= p.m || column >= p.n) continue;
      const uint8_t* from = staging + piece / 8 * kStagingRow + piece % 8 * 16;
      ElementD* y = p.y + row * p.y_pitch + column;
      if (vectors && column + 8 <= p.n) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < min(8, p.n - column); ++i) y[i] = reinterpret_cast<const ElementD*>(from)[i];
      }
    }
  }
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
// Keeps metadata in its registers until the wgmma that read it are done. ptxas reuses a register once the last
// instruction that reads it is issued, but wgmma reads metadata while it runs. The store never executes, which
// ptxas cannot know: k_tiles is at least 1.
__device__ __forceinline__ void keep(const uint32_t (&words)[kBlocks][kWords], int k_tiles, const void* to) {
  if (k_tiles > 0) return;
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kWords; ++i)
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                 "r"(words[i / kWords][i % kWords]) : "memory");
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer) {
  const Tiles tiles(p);
  const int thread = threadIdx.x % 128;
  Position position{0, 0};
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const TileCoord at = tiles.at(tile);
    Accumulator accumulators[kBlocks][kCount];
    int previous = 0;  // the stage of the MMAs that may still run
    // Issues the MMAs of a stage, which read its metadata in `words`, then waits for those of the stage before,
    // which read `others`. After that the stage before is released, and the next call may overwrite `others`.
    const auto multiply_stage = [&](int k_tile, uint32_t (&words)[kBlocks][kWords],
                                    const uint32_t (&others)[kBlocks][kWords]) {
      const int stage = position.stage;
      shared.full[stage].wait(position.phase);
      const auto* metadata = reinterpret_cast<const uint32_t*>(shared.metadata[stage]) + thread;
      CUTE_UNROLL
      for (int i = 0; i < kBlocks * kWords; ++i)
        words[i / kWords][i % kWords] = metadata[(consumer * kBlocks * kWords + i) * 128];
      // Rows are swizzled by their own bytes: 64 of values (layout 2), 128 of x (layout 1).
      constexpr int kBytes = kBlockRows * kValuesRow;  // of the values of a block
      const uint64_t values = matrix(shared.values[stage] + consumer * kBlocks * kBytes, 0, 8 * kValuesRow, 2);
      const uint64_t x = matrix(shared.x[stage], 0, 8 * kXRow, 1);
      cute::warpgroup_arrive();
      // Two instructions for each block, of half a row each; descriptors count 16 bytes. Each instruction reads
      // the words of two threads of every four, which its selector chooses: a word of each thread serves both.
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        Wgmma::fma<0>(values + block * (kBytes / 16), x, words[block][0], accumulators[block],
                      k_tile != 0);
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        Wgmma::fma<1>(values + block * (kBytes / 16) + 2, x + 4, words[block][kWords - 1],
                      accumulators[block], true);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      keep(others, p.k_tiles, shared.staging);
      if (k_tile != 0) release_read(shared.empty[previous]);
      previous = stage;
      position.advance();
    };
    // Metadata of even and of odd k tiles has registers of its own, so the loop has two copies of its body.
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
    for (int block = 0; block < kBlocks; ++block) fence(accumulators[block]);
    release_read(shared.empty[previous]);  // before the epilogue, during which the next stages are loaded
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block)
      store(p, shared.staging[consumer], accumulators[block], at.n + (consumer * kBlocks + block) * kBlockRows,
            at.m, consumer);
  }
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    sparse_gemm_sm90a_bf16_bias_silu_2x1x32_stages8_a4219a98(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&p.values_map);
    cute::prefetch_tma_descriptor(&p.x_map);
    cute::prefetch_tma_descriptor(&p.metadata_map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);                // the producer
      shared.empty[stage].init(4 * kConsumers);  // every consumer warp
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // no thread waits or arrives before barriers are initialized
  wait_for_previous_grid();  // before any access to global memory
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1);
  }
}
