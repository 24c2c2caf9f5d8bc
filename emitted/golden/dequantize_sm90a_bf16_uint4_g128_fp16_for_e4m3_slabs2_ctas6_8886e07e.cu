// dequantize_sm90a_bf16_uint4_g128_fp16_for_e4m3_slabs2_ctas6_8886e07e
//
// W [experts, n, k] of quantized weights: scale * (code - zero point), rounded to fp32
//   uint4 to bf16; codes in the order for e4m3 activations
// Digest 8886e07e37eeb2f06488452a9d4295587b31f8433dc664c0d05879004acadd84; `warploom show` prints this file.
//
// Launch: 128 threads; grid: one CTA per 64 rows and 256 columns of an expert
// A warp has 16 rows of each slab: it decodes what it has loaded into shared memory of its own, where it has
// whole rows; it loads its part of the next slab, and stores the rows meanwhile. No warp waits for another.
// Registers per thread: at most 80, for 6 CTAs of 128 threads per SM.
// Shared memory: 18432 bytes, static. No barriers.
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

constexpr int kThreads = 128, kRows = 64, kDepth = 128;  // of a slab: rows and k
constexpr int kSlabs = 2, kCtasPerSm = 6;  // slabs along k of a CTA

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const uint8_t* data;  // [experts][row_blocks][slabs_of_k]: slabs
  uint16_t* w;  // [experts][n][k]: the result
  int64_t row_stride;  // elements between rows of w
  int64_t expert_stride;  // elements between experts
  int32_t n;  // rows of an expert
  int32_t k;  // columns
  int32_t row_blocks;  // slabs along n of an expert
  int32_t slabs_of_k;  // slabs along k
  int32_t chunks;  // CTAs along k
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, data) == 0 && OFFSET(Parameters, w) == 8);
static_assert(OFFSET(Parameters, row_stride) == 16 && OFFSET(Parameters, expert_stride) == 24);
static_assert(OFFSET(Parameters, n) == 32 && OFFSET(Parameters, k) == 36);
static_assert(OFFSET(Parameters, row_blocks) == 40 && OFFSET(Parameters, slabs_of_k) == 44);
static_assert(OFFSET(Parameters, chunks) == 48);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// Two values, rounded to nearest.
__device__ __forceinline__ uint32_t rounded(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// ---- Slabs: a warp has 16 rows of each --------------------------------------------------------------------
constexpr int kWarpRows = 16;

// A slab of 64 rows by 128 k: 4096 bytes of codes, in the order in which threads hold wgmma's A operand
// (16 bytes a thread, 2048 a piece), then the scales of its groups, those of rows r and r + 8 adjacent.
struct Slab {
  static constexpr int kBytes = 4288, kPieceBytes = 2048, kPieces = 4096 / kPieceBytes;
  static constexpr int kStep = 32, kSteps = kDepth / kStep, kWords = 2;
  static constexpr int kOfRegister = kStep / 8;  // values of a thread that lie in one register
  static constexpr int kGroups = 1;
  static constexpr int kScales = 4096, kZeros = kScales + 128;
};

// Subnormal operands count in full: what follows depends on it.
// (a & mask) | more in one instruction, where the compiler makes two of two constants.
__device__ __forceinline__ uint32_t masked_with(uint32_t a, uint32_t mask, uint32_t more) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(more));
  return d;
}
// Four bytes of b:a (0..3 are a's) by the nibbles of `choice`; 8 more is that byte's sign, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(choice));
  return d;
}

// uint4 by e4m3: exact (q - z) / kUnit; the scale is applied later. Bits 0 to 3 of e4m3 are an integer n
// that means n 2^-9, as 16 does too. With 128 more no byte borrows from the next, and its sign is that of q - z,
// turned round: PRMT makes a mask of it, by which what is negative becomes its size and a sign.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 512;
  uint32_t zero[2];  // of a row, in each byte

  __device__ __forceinline__ explicit Decode(uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) zero[row] = permute(zeros, 0, row ? 0x1111 : 0);
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = i % 2 ? words[i / 2] >> 4 : words[i / 2];
      const uint32_t more = masked_with(nibbles, 0x0f0f0f0f, 0x80808080) - zero[i % 2];
      const uint32_t negative = ~permute(more, 0, 0xba98);
      registers[i] = ((more ^ negative) & 0x7f7f7f7f) + (negative & 0x81818181);
    }
  }
};
static_assert(Decode::kWords == Slab::kWords);

// Element i of four e4m3. Exponent and mantissa where fp32 has them mean w 2^-120, subnormal or not.
__device__ __forceinline__ float number(uint32_t bytes, int i) {
  const uint32_t byte = bytes >> 8 * i;
  return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

// A group's scales of a thread's rows r and r + 8, and their zero points, a byte each.
struct Group {
  uint32_t scales;
  uint32_t zeros;

  __device__ __forceinline__ float low() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[0]); }
  __device__ __forceinline__ float high() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[1]); }

  // Reads those of a group from its slab, where both rows' are adjacent.
  __device__ __forceinline__ void read(const Parameters&, const uint8_t* slab, int, int group) {
    const int place = group * kRows + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4 * 2;
    scales = __ldcs(reinterpret_cast<const uint32_t*>(slab + Slab::kScales) + place / 2);
    zeros = __ldcs(reinterpret_cast<const uint16_t*>(slab + Slab::kZeros) + place / 2);
  }
};

// The codes, scales and zero points of a slab that a thread holds in registers.
struct Loaded {
  uint32_t words[Slab::kPieces * 4 / Slab::kWords][Slab::kWords];
  Group groups[Slab::kGroups];

  __device__ __forceinline__ void load(const Parameters& p, const uint8_t* slab, int block) {
    CUTE_UNROLL
    for (int i = 0; i < Slab::kPieces; ++i) {
      const uint4 piece = __ldcs(reinterpret_cast<const uint4*>(slab + i * Slab::kPieceBytes) + threadIdx.x);
      uint32_t* const to = words[0] + 4 * i;
      to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
    }
    CUTE_UNROLL
    for (int i = 0; i < Slab::kGroups; ++i) groups[i].read(p, slab, block, i);
  }
};

// The 16 rows of a warp in shared memory, padded so that its threads write decoded values to different banks.
struct Staged {
  static constexpr int kRowWords = kDepth / 2 + Slab::kOfRegister * 2;  // words
  alignas(16) uint32_t words[kWarpRows * kRowWords];

  // Decodes what a thread holds of a slab: every thread of the warp calls it.
  __device__ __forceinline__ void decode(const Loaded& loaded) {
    const int lane = threadIdx.x % 32;
    uint32_t* const to = words + lane / 4 * kRowWords + lane % 4 * (Slab::kOfRegister / 2);
    CUTE_UNROLL
    for (int step = 0; step < Slab::kSteps; ++step) {
      const Group& group = loaded.groups[step * Slab::kGroups / Slab::kSteps];
      uint32_t registers[4];  // of A: (row, low k), (row + 8, low k), (row, high k), (row + 8, high k)
      Decode(group.zeros).step(loaded.words[step], registers);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float scale = i % 2 ? group.high() : group.low();
        float values[Slab::kOfRegister];
        CUTE_UNROLL
        for (int j = 0; j < Slab::kOfRegister; ++j) {
          values[j] = number(registers[i], j) * Decode::kUnit * scale;
        }
        uint32_t* const at = to + i % 2 * 8 * kRowWords + (step * Slab::kStep + i / 2 * Slab::kStep / 2) / 2;
        CUTE_UNROLL
        for (int j = 0; j < Slab::kOfRegister / 2; ++j) at[j] = rounded(values[2 * j], values[2 * j + 1]);
      }
    }
  }

  // Stores the rows to W: half a warp has a row, and each thread 16 bytes of it. `aligned` says whether rows of
  // W begin at multiples of 16 bytes; elements past `rows` and `columns` are not written.
  __device__ __forceinline__ void store(uint16_t* to, int64_t row_stride, int rows, int columns,
                                        bool aligned) const {
    const int lane = threadIdx.x % 32, column = lane % 16 * 8;
    const uint32_t* from = words + lane / 16 * kRowWords + column / 2;
    to += lane / 16 * row_stride + column;
    if (aligned && rows >= kWarpRows && columns >= kDepth) {
      CUTE_UNROLL
      for (int row = 0; row < kWarpRows; row += 2) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + row * kRowWords);
        to += 2 * row_stride;
      }
      return;
    }
    const int count = min(columns - column, 8);  // of this thread's columns
    CUTE_NO_UNROLL
    for (int row = lane / 16; row < rows && row < kWarpRows; row += 2) {
      if (aligned && count == 8) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < count; ++i) to[i] = uint16_t(from[i / 2] >> i % 2 * 16);
      }
      from += 2 * kRowWords, to += 2 * row_stride;
    }
  }
};
static_assert(sizeof(Staged) * (kThreads / 32) == 18432);

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    dequantize_sm90a_bf16_uint4_g128_fp16_for_e4m3_slabs2_ctas6_8886e07e(const __grid_constant__ Parameters p) {
  __shared__ Staged staged[kThreads / 32];  // each is its warp's alone
  const int block = blockIdx.x / p.chunks, first = blockIdx.x % p.chunks * kSlabs;  // of all experts; along k
  const int slabs = min(kSlabs, p.slabs_of_k - first), warp = threadIdx.x / 32;
  const int row = block % p.row_blocks * kRows + warp * kWarpRows;
  const uint8_t* from = p.data + (int64_t(block) * p.slabs_of_k + first) * Slab::kBytes;
  uint16_t* const to = p.w + block / p.row_blocks * p.expert_stride + row * p.row_stride;
  const bool aligned = (reinterpret_cast<uint64_t>(p.w) | 2 * p.row_stride | 2 * p.expert_stride) % 16 == 0;
  wait_for_previous_grid();
  Loaded loaded;
  loaded.load(p, from, block);
  CUTE_NO_UNROLL
  for (int i = 0; i < slabs; ++i) {
    staged[warp].decode(loaded);
    __syncwarp();
    from += Slab::kBytes;
    if (i + 1 < slabs) loaded.load(p, from, block);  // while this one is stored
    const int column = (first + i) * kDepth;
    staged[warp].store(to + column, p.row_stride, p.n - row, p.k - column, aligned);
    __syncwarp();  // before the next slab takes its place
  }
}
