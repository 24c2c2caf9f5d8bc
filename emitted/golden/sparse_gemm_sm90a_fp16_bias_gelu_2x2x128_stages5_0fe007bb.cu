// sparse_gemm_sm90a_fp16_bias_gelu_2x2x128_stages5_0fe007bb
//
// y = gelu(x W' + bias), fp16, W 2:4 sparse
//   256 rows of W by 128 of x a tile, 2 consumers, 5 stages
// Digest 0fe007bb33edfd35f3716efff90dbb34fd248aad4378cd1610585794da51d566; `warploom show` prints this file.
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

using Element = cutlass::half_t;
constexpr int kConsumers = 2, kBlocks = 2;  // blocks of 64 rows, of a consumer
constexpr int kTokens = 128, kStages = 5;
constexpr int kTileK = 64;
constexpr int kRows = 64 * kConsumers * kBlocks, kRowBlocks = kRows / 64;
constexpr int kCount = kTokens / 2;  // sums of a thread in 64 rows
constexpr int kValuesBytes = kRows * kTileK, kTokensBytes = kTokens * kTileK * 2;
constexpr int kWordsBytes = 128 * 4;  // metadata of 64 rows and 64 columns: a word of each thread
constexpr int kChunk = 64, kPitch = 144;
constexpr int kGroup = 8;
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cute::TmaDescriptor x_map;  // x [m, k]
  cute::TmaDescriptor values_map;  // values of W [n, k / 2]
  const uint8_t* metadata;  // [n / 64][k / 64][128] words, rounded up
  cutlass::half_t* y;  // [m][y_pitch]
  const cutlass::half_t* bias;  // [n]
  int64_t y_pitch;  // elements between rows of y
  int32_t m;  // rows of x
  int32_t n;  // rows of W
  int32_t k_tiles;  // of 64 columns
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, x_map) == 0 && OFFSET(Parameters, values_map) == 128);
static_assert(OFFSET(Parameters, metadata) == 256 && OFFSET(Parameters, y) == 264);
static_assert(OFFSET(Parameters, bias) == 272 && OFFSET(Parameters, y_pitch) == 280);
static_assert(OFFSET(Parameters, m) == 288 && OFFSET(Parameters, n) == 292);
static_assert(OFFSET(Parameters, k_tiles) == 296);

// A position in a ring of buffers. The phase is the parity that the next wait looks for: it flips
// each time the ring wraps, so a barrier needs no reset.
template <int kCount> struct Ring {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};
using Position = Ring<kStages>;

// A matrix in shared memory as wgmma is told of it: rows come in groups of 8, `stride` bytes from one
// group to the next, swizzled by `layout`; `leading` bytes from one box of columns to the next. Adding
// to the result moves the start, in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix(const uint8_t* start, int leading, int stride, int layout) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(start) >> 4;
  descriptor.bitfield.leading_byte_offset_ = leading >> 4;
  descriptor.bitfield.stride_byte_offset_ = stride >> 4;
  descriptor.bitfield.layout_type_ = layout;
  return descriptor;
}

// A warp gives a stage back that it read by itself. The fence orders its reads before what TMA writes there next: an
// arrival alone does not wait for reads that were issued before it, and where processes take turns on a GPU, TMA was
// seen to overwrite the end of a stage that was still being read.
__device__ __forceinline__ void release_read(EmptyBarrier& empty) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// x * Phi(x), Phi being the normal distribution function: by the rational approximation of erfc in
// Abramowitz and Stegun 7.1.26 (|error| < 1.5e-7), which keeps the negative tail and has no branch.
struct Gelu {
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = function(x[i / 2][i % 2]);
  }

  __device__ __forceinline__ static float function(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * x * x));  // exp(-x^2 / 2)
    float tail = fmaf(t, 0.530702714f, -0.726576013f);  // half of erfc's coefficients
    tail = fmaf(t, fmaf(t, fmaf(t, tail, 0.710706870f), -0.142248368f), 0.127414796f) * t * power;
    return x * (x < 0.f ? tail : 1.f - tail);
  }
};

struct Shared {
  alignas(1024) uint8_t tokens[kStages][kTokensBytes];
  alignas(1024) uint8_t values[kStages][kValuesBytes];
  alignas(128) uint8_t metadata[kStages][kRowBlocks * kWordsBytes];
  alignas(128) uint8_t staging[kConsumers][kChunk * kPitch];  // y of 64 rows of W: a line a token
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};
static_assert(sizeof(Shared) <= 193536);

// The sums of 64 rows of W and all tokens, of 32 columns. The instruction takes metadata of two of each four
// threads: kSelector says which, so that a word serves two instructions.
template <int kSelector>
__device__ __forceinline__ void multiply(float (&sums)[kCount], uint64_t values, uint64_t tokens, uint32_t word,
                                         int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %68, 0;\n"
      "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, %66, %67, add, 1, 1, 0, 0;\n}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), 
"+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), 
"+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), 
"+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), 
"+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), 
"+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), 
"+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), 
"+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), 
"+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), 
"+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), 
"+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), 
"+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), 
"+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), 
"+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), 
"+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), 
"+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
: "l"(values), "l"(tokens), "r"(word), "n"(kSelector), "r"(add));
}

// Tiles of y in the order in which they are computed: kGroup tiles of rows of W for some tokens, then the next.
struct Walk {
  int down, across, tiles;

  __device__ __forceinline__ explicit Walk(const Parameters& p)
      : down((p.n + kRows - 1) / kRows), across((p.m + kTokens - 1) / kTokens), tiles(down * across) {}

  __device__ __forceinline__ void at(int tile, int& row, int& token) const {
    const int group = tile / (kGroup * across), first = group * kGroup, size = min(kGroup, down - first);
    const int within = tile - group * kGroup * across;
    row = (first + within % size) * kRows;
    token = within / size * kTokens;
  }
};

__device__ __forceinline__ void produce(const Parameters& p, Shared& shared) {
  const Walk walk(p);
  const int row_blocks = (p.n + 63) / 64;
  Position position{0, 1};  // all stages are free: the first wait for a ring that is full looks one phase back
  for (int tile = blockIdx.x; tile < walk.tiles; tile += gridDim.x) {
    int row, token;
    walk.at(tile, row, token);
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
        // Rows past the end have values of 0, and any metadata that is valid: those of the last block.
        const int64_t from = min(row / 64 + block, row_blocks - 1);
        cute::SM90_BULK_COPY_G2S::copy(p.metadata + (from * p.k_tiles + k_tile) * kWordsBytes, barrier,
                                       shared.metadata[stage] + block * kWordsBytes, kWordsBytes);
      }
      position.advance();
    }
  }
}

// Stores the y of 64 rows of W, through shared memory, so that a token's rows of W are written side by side.
__device__ __forceinline__ void store(const Parameters& p, uint8_t* staging, float (&sums)[kCount], int row, int token,
                                      int consumer) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool vectors = (reinterpret_cast<uintptr_t>(p.y) | uint64_t(p.y_pitch) * sizeof(Element)) % 16 == 0;
  const int own = row + warp * 16 + lane / 4;  // and 8 below
  const float upper = own < p.n ? float(p.bias[own]) : 0.f, lower = own + 8 < p.n ? float(p.bias[own + 8]) : 0.f;
  CUTE_UNROLL
  for (int chunk = 0; chunk < kTokens; chunk += kChunk) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");  // the last chunk has been read
    CUTE_UNROLL
    for (int f = 0; f < kChunk / 8; ++f) {
      const float* sum = &sums[(chunk / 8 + f) * 4];
      float x[2][2] = { {sum[0] + upper, sum[1] + upper},
                        {sum[2] + lower, sum[3] + lower}};
      Gelu().apply(x);
      uint32_t pairs[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        cutlass::Array<Element, 2> pair;
        pair[0] = Element(x[half][0]);
        pair[1] = Element(x[half][1]);
        pairs[half] = reinterpret_cast<const uint32_t&>(pair);
      }
      // 16 rows by 8 tokens, turned on the way: a line has the rows of one token.
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
      Element* y = p.y + at * p.y_pitch + first;
      if (vectors && first + 8 <= p.n) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < min(8, p.n - first); ++i) y[i] = reinterpret_cast<const Element*>(from)[i];
      }
    }
  }
}

__device__ __forceinline__ void consume(const Parameters& p, Shared& shared, int consumer) {
  const Walk walk(p);
  const int thread = threadIdx.x % 128;
  Position position{0, 0};
  for (int tile = blockIdx.x; tile < walk.tiles; tile += gridDim.x) {
    int row, token;
    walk.at(tile, row, token);
    float sums[kBlocks][kCount];
    int previous = 0;  // the stage whose products may still be running
    const auto multiply_stage = [&](int k_tile) {
      const int stage = position.stage;
      shared.full[stage].wait(position.phase);
      uint32_t words[kBlocks];
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        words[block] =
            reinterpret_cast<const uint32_t*>(shared.metadata[stage])[(consumer * kBlocks + block) * 128 + thread];
      const uint64_t values = matrix(shared.values[stage] + consumer * kBlocks * 64 * kTileK, 0, 512, 2);
      const uint64_t tokens = matrix(shared.tokens[stage], 0, 1024, 1);
      cute::warpgroup_arrive();
      // Steps are of 32 columns: 32 bytes of values, 64 of tokens, counted by 16.
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        multiply<0>(sums[block], values + block * (64 * kTileK / 16), tokens, words[block], k_tile != 0);
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        multiply<1>(sums[block], values + block * (64 * kTileK / 16) + 2, tokens + 4, words[block], 1);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (k_tile) release_read(shared.empty[previous]);
      previous = stage;
      position.advance();
    };
    // wgmma reads its metadata from registers while it runs, so words may not be loaded into those of products that
    // still run. Two copies of the code have registers of their own: products of the last but one have been waited for.
    int k_tile = 0;
    CUTE_NO_UNROLL
    while (true) {
      multiply_stage(k_tile);
      if (++k_tile == p.k_tiles) break;
      multiply_stage(k_tile);
      if (++k_tile == p.k_tiles) break;
    }
    cute::warpgroup_wait<0>();
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
    sparse_gemm_sm90a_fp16_bias_gelu_2x2x128_stages5_0fe007bb(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that it is uniform
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&p.values_map);
    cute::prefetch_tma_descriptor(&p.x_map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(4 * kConsumers);  // a warp each
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1);
  }
}
