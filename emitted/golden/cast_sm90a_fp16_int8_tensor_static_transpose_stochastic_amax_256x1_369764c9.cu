// cast_sm90a_fp16_int8_tensor_static_transpose_stochastic_amax_256x1_369764c9
//
// x fp16 to q int8 with given fp32 scales of a tensor; of x.T too
//   rounded stochastically; 256 threads a CTA
// Digest 369764c9f8740d6ba4d3d34be3d6f415922aaa5474afdba0db931cc7bf29edad; `warploom show` prints this file.
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

using X = cutlass::half_t;
constexpr int kThreads = 256, kVectors = 1;
// A thread quantizes kValues values of a row at once; kLanes threads share a part of kColumns columns.
constexpr int kValues = 16, kColumns = 128, kLanes = kColumns / kValues;
constexpr bool kIsFp8 = false;
constexpr float kLargest = 127.f;  // of q
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  const cutlass::half_t* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  const float* scale;  // of blocks of x
  uint8_t* q_t;  // [n][q_t_pitch]: q of x.T
  const uint2* state;  // [2]: seeds random numbers
  unsigned* amax;  // bits of an fp32 number, raised
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int64_t q_t_pitch;  // bytes between rows of q_t
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, q_t) == 24);
static_assert(OFFSET(Parameters, state) == 32 && OFFSET(Parameters, amax) == 40);
static_assert(OFFSET(Parameters, x_pitch) == 48 && OFFSET(Parameters, q_pitch) == 56);
static_assert(OFFSET(Parameters, scale_down) == 64 && OFFSET(Parameters, scale_across) == 72);
static_assert(OFFSET(Parameters, q_t_pitch) == 80 && OFFSET(Parameters, m) == 88);
static_assert(OFFSET(Parameters, n) == 92 && OFFSET(Parameters, across) == 96);

// ---- Vectors of x -------------------------------------------------------------------------------------
// The larger one; NaN wins over every number.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// That of threads whose numbers differ in the lowest bits, of so many threads; all of the warp take part.
template <int kWidth> __device__ __forceinline__ float largest(float value) {
  CUTE_UNROLL
  for (int apart = kWidth / 2; apart > 0; apart /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffff, value, apart));
  return value;
}

// That of a CTA; `shared` has a number for each warp.
template <int kWarps> __device__ __forceinline__ float largest_of_cta(float value, float* shared) {
  value = largest<32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % kWarps];
  return largest<kWarps>(value);
}

// Values of a row that follow each other.
struct Vector {
  static constexpr int kWords = kValues * sizeof(X) / sizeof(uint4);
  union {
    uint4 words[kWords];
    X values[kValues];
  };

  __device__ __forceinline__ Vector() {}

  __device__ __forceinline__ float peak() const {
    float peak = fabsf(float(values[0]));
    CUTE_UNROLL
    for (int i = 1; i < kValues; ++i) peak = larger(peak, fabsf(float(values[i])));
    return peak;
  }
};

// Whether 16 bytes of each row can be moved at once.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// Writes the first `count` of 16 bytes.
__device__ __forceinline__ void store(uint8_t* to, const uint4& bytes, int count, bool aligned) {
  if (aligned && count >= kValues) {
    *reinterpret_cast<uint4*>(to) = bytes;
  } else {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i)
      if (i < count) to[i] = uint8_t(words[i / 4] >> i % 4 * 8);
  }
}

// ---- Scales -------------------------------------------------------------------------------------------
// What values are multiplied by: 0 of a scale of 0.
__device__ __forceinline__ float factor_of(float scale) {
  const float factor = __frcp_rn(scale);
  return fabsf(factor) == infinity() ? copysignf(scale == 0.f ? 0.f : 3.402823466e38f, scale) : factor;
}
__device__ __forceinline__ float read_factor(const Parameters& p, int row, int part) {
  return factor_of(p.scale[row * p.scale_down + part * p.scale_across]);
}

// ---- Rounding -----------------------------------------------------------------------------------------
// Random numbers of 16 bits: Philox4x32 (Salmon et al., 2011; 7 rounds, key 0) of what the same function makes of a
// state, with the place of 8 values added bit by bit: a row and a group of 8 columns, of x (0) or of x.T (1).
__device__ __forceinline__ uint4 philox(uint4 x) {
  CUTE_UNROLL
  for (int round = 0; round < 7; ++round) {
    const uint64_t first = uint64_t(x.x) * 0xd2511f53u, second = uint64_t(x.z) * 0xcd9e8d57u;
    x = make_uint4(uint32_t(second >> 32) ^ x.y ^ round * 0x9e3779b9u, uint32_t(second),
                   uint32_t(first >> 32) ^ x.w ^ round * 0xbb67ae85u, uint32_t(first));
  }
  return x;
}

struct Random {
  uint4 state;
  uint32_t words[kValues / 2];

  __device__ __forceinline__ explicit Random(const Parameters& p) {
    const uint2 low = p.state[0], high = p.state[1];
    state = philox(make_uint4(low.x, low.y, high.x, high.y));
  }
  // Draws numbers for values of a row, from a column that is a multiple of kValues.
  __device__ __forceinline__ void draw(int row, int column, int transposed) {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 8; ++i) {
      const uint4 four = philox(make_uint4(row ^ state.x, (column / 8 + i) ^ state.y, transposed ^ state.z, state.w));
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }
  __device__ __forceinline__ uint32_t number(int i) const { return words[i / 2] >> i % 2 * 16 & 0xffff; }
};

// The value of q below or above, whose mean is the value: a number is added to the bits that q has not, which are then
// left out. What is smaller than the smallest normal number of q has these as if it were one, after that is added.
__device__ __forceinline__ float rounded(float value, uint32_t number) {
  const float magnitude = fminf(fabsf(value), 128.f), base = 128.f;
  constexpr int kBits = 16;
  constexpr uint32_t kHalf = 0;
  uint32_t bits = __float_as_uint(__fadd_rn(magnitude, base));
  bits = (bits + ((number << (kBits - 16)) + kHalf)) & ~((1u << kBits) - 1);
  const float result = copysignf(__fsub_rn(__uint_as_float(bits), base), value);
  return value == value ? result : value;
}

// ---- Values of q --------------------------------------------------------------------------------------
// Four values of q, of which the first has the lowest byte; what is too large becomes the largest.
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  uint32_t word;
  const int first = __float2int_rn(a), second = __float2int_rn(b), third = __float2int_rn(c), fourth = __float2int_rn(d);
  asm("{\n.reg .b32 high;\n"
      "cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}"
      : "=r"(word) : "r"(first), "r"(second), "r"(third), "r"(fourth));
  return word;
}

// 16 values; `peak` is at least as large as their magnitudes, or NaN. An infinite one stays infinite in e5m2, is NaN in
// e4m3, which has no infinity, and the largest in int8.
template <class Value>
__device__ __forceinline__ uint4 quantized(Value&& x, float factor, float peak, const Random& random) {
  uint32_t words[4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float four[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j] = rounded(__fmul_rn(x(4 * i + j), factor), random.number(4 * i + j));
    words[i] = packed(four[0], four[1], four[2], four[3]);
  }
  if (kIsFp8 && !(peak < infinity())) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) {
      if (fabsf(x(i)) != infinity()) continue;
      constexpr uint32_t kCode = 0x7f;
      const uint32_t code = kCode | ((x(i) < 0.f) != (factor < 0.f) ? 0x80 : 0);
      words[i / 4] = (words[i / 4] & ~(0xffu << i % 4 * 8)) | code << i % 4 * 8;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// ---- The largest magnitude of x -----------------------------------------------------------------------
// Raises the bits of a number that is not negative to those of a CTA's largest; NaN wins.
__device__ __forceinline__ void raise(unsigned* bits, float peak) {
  atomicMax(reinterpret_cast<int*>(bits), __float_as_int(peak));
}

// ---- Tiles of 128 rows and columns ------------------------------------------------------------------------
constexpr int kTile = kColumns, kCtas = 4;
constexpr int kRows = kThreads / kLanes;  // that a CTA has at once
// Chunks of 16 bytes of a row of the tile. Those of one vector are kLanes chunks apart, so that threads that read or
// write neighbouring vectors use all banks.
constexpr int kChunks = kTile * sizeof(X) / sizeof(uint4), kPer = kChunks / kLanes;

struct Shared {
  uint4 x[kTile][kChunks];
  uint4 q[kTile][kLanes];
  float peaks[4][kTile];
};
static_assert(sizeof(Shared) == 51200);

// Loads the tile; what is past the ends of x are zeros.
__device__ __forceinline__ void load(const Parameters& p, Shared& shared, int row0, int column0) {
  constexpr int kEach = sizeof(uint4) / sizeof(X);  // elements of a chunk
  const bool is_aligned = aligned(p.x, p.x_pitch);
  CUTE_UNROLL
  for (int i = 0; i < kTile * kChunks / kThreads; ++i) {
    const int row = (i * kThreads + threadIdx.x) / kChunks, place = threadIdx.x % kChunks;
    const int column = column0 + (place % kLanes * kPer + place / kLanes) * kEach;
    const int count = row0 + row < p.m ? max(0, min(kEach, p.n - column)) : 0;
    const X* from = count > 0 ? p.x + (row0 + row) * p.x_pitch + column : p.x;
    if (is_aligned) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :: "r"(cute::cast_smem_ptr_to_uint(&shared.x[row][place])), "l"(from), "r"(count * int(sizeof(X)))
                   : "memory");
    } else {
      X* to = reinterpret_cast<X*>(&shared.x[row][place]);
      CUTE_UNROLL
      for (int j = 0; j < kEach; ++j) to[j] = j < count ? from[j] : X(0.f);
    }
  }
  asm volatile("cp.async.commit_group;\ncp.async.wait_all;" ::: "memory");
  __syncthreads();
}

__device__ __forceinline__ void read(const Shared& shared, Vector& vector, int row, int lane) {
  CUTE_UNROLL
  for (int i = 0; i < kPer; ++i) vector.words[i] = shared.x[row][i * kLanes + lane];
}

// Where the tile of q of x.T has a chunk of a row: neighbouring rows' are in other banks.
__device__ __forceinline__ int place(int row, int chunk) {
  return chunk ^ (row >> 2 & 7);
}

// Writes it, whole rows of 128 bytes at a time.
__device__ __forceinline__ void store_transposed(const Parameters& p, const uint4 (&q)[kTile][kLanes], int row0,
                                                 int column0) {
  const bool is_aligned = aligned(p.q_t, p.q_t_pitch);
  const int lane = threadIdx.x % kLanes, count = p.m - (row0 + lane * kValues);
  CUTE_UNROLL
  for (int i = 0; i < kTile / kRows; ++i) {
    const int row = i * kRows + threadIdx.x / kLanes;
    if (column0 + row >= p.n || count <= 0) continue;
    store(p.q_t + (column0 + row) * p.q_t_pitch + row0 + lane * kValues, q[row][place(row, lane)], count, is_aligned);
  }
}

// Transposes the bytes of q: a thread has four columns of the tile and 16 of its rows.
__device__ __forceinline__ void transpose(const uint4 (&q)[kTile][kLanes], uint4 (&q_t)[kTile][kLanes]) {
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  uint32_t columns[4][4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t rows[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) rows[j] = reinterpret_cast<const uint32_t*>(q[part * kValues + 4 * i + j])[lane];
    const uint32_t low[2] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[2], rows[3], 0x5140)};
    const uint32_t high[2] = {__byte_perm(rows[0], rows[1], 0x7362), __byte_perm(rows[2], rows[3], 0x7362)};
    columns[0][i] = __byte_perm(low[0], low[1], 0x5410), columns[1][i] = __byte_perm(low[0], low[1], 0x7632);
    columns[2][i] = __byte_perm(high[0], high[1], 0x5410), columns[3][i] = __byte_perm(high[0], high[1], 0x7632);
  }
  CUTE_UNROLL
  for (int j = 0; j < 4; ++j)
    q_t[4 * lane + j][place(4 * lane + j, part)] =
        make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
    cast_sm90a_fp16_int8_tensor_static_transpose_stochastic_amax_256x1_369764c9(const __grid_constant__ Parameters p) {
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int down = blockIdx.x / p.across, part = blockIdx.x % p.across;
  const int row0 = down * kTile, column0 = part * kTile;
  const int lane = threadIdx.x % kLanes, column = column0 + lane * kValues;
  const bool q_aligned = aligned(p.q, p.q_pitch);
  load(p, shared, row0, column0);
  Random random(p);
  const float factor = read_factor(p, row0, part);
  float peak_of_all = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kTile / kRows; ++i) {
    const int row = i * kRows + threadIdx.x / kLanes;
    Vector vector;
    read(shared, vector, row, lane);
    const float peak = vector.peak();
    peak_of_all = larger(peak_of_all, peak);
    random.draw(row0 + row, column, 0);
    const auto value = [&](int j) { return float(vector.values[j]); };
    const uint4 bytes = quantized(value, factor, peak, random);
    if (row0 + row < p.m && column < p.n)
      store(p.q + (row0 + row) * p.q_pitch + column, bytes, p.n - column, q_aligned);
    shared.q[row][lane] = bytes;
  }
  __syncthreads();  // x of the tile is read: the transpose lies where it was
  uint4 (&q_t)[kTile][kLanes] = *reinterpret_cast<uint4 (*)[kTile][kLanes]>(&shared.x);
  transpose(shared.q, q_t);
  __syncthreads();
  store_transposed(p, q_t, row0, column0);
  peak_of_all = largest_of_cta<kThreads / 32>(peak_of_all, shared.peaks[0]);
  if (threadIdx.x == 0) raise(p.amax, peak_of_all);
}
