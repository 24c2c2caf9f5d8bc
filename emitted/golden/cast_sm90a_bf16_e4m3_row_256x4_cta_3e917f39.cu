// cast_sm90a_bf16_e4m3_row_256x4_cta_3e917f39
//
// x bf16 to q e4m3 with computed fp32 scales of a row
//   rounded to nearest; 256 threads a CTA
// Digest 3e917f39cf5b4ab6ab7e6157138532c24a7c90b4bb2705a073bb769717e1dafb; `warploom show` prints this file.
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

using X = cutlass::bfloat16_t;
constexpr int kThreads = 256, kVectors = 4;
// A thread quantizes kValues values of a row at once; kLanes threads share a part of kColumns columns.
constexpr int kValues = 16, kColumns = 128, kLanes = kColumns / kValues;
constexpr bool kIsFp8 = true;
constexpr float kLargest = 448.f;  // of q
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  const cutlass::bfloat16_t* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  float* scale;  // of blocks of x
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, x_pitch) == 24);
static_assert(OFFSET(Parameters, q_pitch) == 32 && OFFSET(Parameters, scale_down) == 40);
static_assert(OFFSET(Parameters, scale_across) == 48 && OFFSET(Parameters, m) == 56);
static_assert(OFFSET(Parameters, n) == 60 && OFFSET(Parameters, across) == 64);

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

  // Those past `count` are zeros.
  __device__ __forceinline__ void load(const X* from, int count, bool aligned) {
    if (aligned && count >= kValues) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) values[i] = i < count ? from[i] : X(0.f);
    }
  }

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
// What values are multiplied by, of the largest magnitude of a block. Where that is 0, infinite or NaN it is 1.
__device__ __forceinline__ float factor_of(float peak) {
  float factor = fminf(__fdiv_rn(kLargest, peak), 3.402823466e38f);
  return peak > 0.f && peak < infinity() ? factor : 1.f;
}
// The scale of a factor, as it is stored.
__device__ __forceinline__ float scale_of(float factor) { return __frcp_rn(factor); }

// ---- Rounding -----------------------------------------------------------------------------------------
struct Random {
  __device__ __forceinline__ explicit Random(const Parameters&) {}
  __device__ __forceinline__ void draw(int, int, int) {}
  __device__ __forceinline__ uint32_t number(int) const { return 0; }
};
__device__ __forceinline__ float rounded(float value, uint32_t) { return value; }  // as it is converted

// ---- Values of q --------------------------------------------------------------------------------------
// Four values of q, of which the first has the lowest byte; what is too large becomes the largest.
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
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

// ---- Whole rows: read for their largest magnitudes, and again, from the caches, for their values ----------
constexpr int kRowThreads = kThreads;  // that share a row

extern "C" __global__ void __launch_bounds__(kThreads)
    cast_sm90a_bf16_e4m3_row_256x4_cta_3e917f39(const __grid_constant__ Parameters p) {
  // What comes before this may run under the kernel before, and the next kernel's under this one.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  constexpr int kStep = kRowThreads * kValues;  // columns that these load at once
  const bool x_aligned = aligned(p.x, p.x_pitch), q_aligned = aligned(p.q, p.q_pitch);
  const int row = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= p.m) return;  // of all threads of the row
  const int lane = threadIdx.x % kRowThreads;
  const X* x = p.x + row * p.x_pitch;
  const auto each = [&](auto&& use) {
    for (int first = lane * kValues; first < p.n; first += kStep * kVectors) {
      Vector vectors[kVectors];
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i)
        vectors[i].load(x + first + i * kStep, p.n - (first + i * kStep), x_aligned);
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) use(vectors[i], first + i * kStep);
    }
  };
  float peak = 0.f;
  each([&](const Vector& vector, int) { peak = larger(peak, vector.peak()); });
  __shared__ float shared[kThreads / 32];
  peak = largest_of_cta<kThreads / 32>(peak, shared);
  const float factor = factor_of(peak);
  if (lane == 0) p.scale[row * p.scale_down] = scale_of(factor);
  Random random(p);
  each([&](const Vector& vector, int column) {
    if (column >= p.n) return;
    random.draw(row, column, 0);
    const auto value = [&](int j) { return float(vector.values[j]); };
    store(p.q + row * p.q_pitch + column, quantized(value, factor, peak, random), p.n - column, q_aligned);
  });
}
