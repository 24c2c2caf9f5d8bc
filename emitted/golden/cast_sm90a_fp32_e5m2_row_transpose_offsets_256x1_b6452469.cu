// cast_sm90a_fp32_e5m2_row_transpose_offsets_256x1_b6452469
//
// x fp32 to q e5m2 with computed fp32 scales of a row; of x.T too
//   rows are in groups that end at offsets in device memory; in q of x.T each begins at a multiple of 128
//   rounded to nearest; 256 threads a CTA
// Two kernels: factors, of rows and columns, and main, which reads them.
// Digest b64524696fc5da16d2371318895e01f0fbc2e8659ee7885ce4ad94b1cc73be8c; `warploom show` prints this file.
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

using X = float;
constexpr int kThreads = 256;
constexpr int kValues = 8;  // of a row, that a thread quantizes at once
constexpr int kColumns = 128, kLanes = kColumns / kValues;  // kLanes threads have kColumns columns of a row
constexpr float kLargest = 57344.f;  // of q
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const float* x;  // [m][x_pitch]
  uint8_t* q;  // [m][q_pitch]
  float* scale;  // of blocks of x
  uint8_t* q_t;  // [n][q_t_pitch]: q of x.T
  float* scale_t;  // of blocks of x.T
  const int* offsets;  // [groups]: where each ends in x
  int* ends;  // [groups]: where each ends in q_t, a multiple of 128
  float* factors;  // what rows and, behind all, columns are multiplied by
  float* peaks;  // [across][rows], [down][columns]: of parts of them
  unsigned* done;  // [down + across]: left as zeros; CTAs of a part
  int64_t x_pitch;  // elements between rows of x
  int64_t q_pitch;  // bytes between rows of q
  int64_t scale_down;  // elements to the scale below
  int64_t scale_across;  // elements to the next scale
  int64_t q_t_pitch;  // bytes between rows of q_t
  int64_t scale_t_down;  // elements to that below
  int64_t scale_t_across;  // elements to the next
  int32_t m;  // rows of x
  int32_t n;  // columns of x
  int32_t across;  // parts of 128 columns
  int32_t groups;  // of rows
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, q_t) == 24);
static_assert(OFFSET(Parameters, scale_t) == 32 && OFFSET(Parameters, offsets) == 40);
static_assert(OFFSET(Parameters, ends) == 48 && OFFSET(Parameters, factors) == 56);
static_assert(OFFSET(Parameters, peaks) == 64 && OFFSET(Parameters, done) == 72);
static_assert(OFFSET(Parameters, x_pitch) == 80 && OFFSET(Parameters, q_pitch) == 88);
static_assert(OFFSET(Parameters, scale_down) == 96 && OFFSET(Parameters, scale_across) == 104);
static_assert(OFFSET(Parameters, q_t_pitch) == 112 && OFFSET(Parameters, scale_t_down) == 120);
static_assert(OFFSET(Parameters, scale_t_across) == 128 && OFFSET(Parameters, m) == 136);
static_assert(OFFSET(Parameters, n) == 140 && OFFSET(Parameters, across) == 144);
static_assert(OFFSET(Parameters, groups) == 148);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Vectors of x -------------------------------------------------------------------------------------
// max(a, b) that returns NaN where either is.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// kValues adjacent values of a row.
struct Vector {
  static constexpr int kWords = kValues * sizeof(X) / sizeof(uint4);
  union {
    uint4 words[kWords];
    X values[kValues];
  };

  __device__ __forceinline__ Vector() {}

  // Loads the first `count` values, and zeros for the others.
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

// Whether every row starts at a multiple of 16 bytes.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// Writes the first `count` of 8 or 16 bytes.
template <class Bytes>
__device__ __forceinline__ void store(uint8_t* to, const Bytes& bytes, int count, bool aligned) {
  constexpr int kCount = sizeof(Bytes);
  if (aligned && count >= kCount) {
    *reinterpret_cast<Bytes*>(to) = bytes;
  } else {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&bytes);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) to[i] = uint8_t(words[i / 4] >> i % 4 * 8);
  }
}

// ---- Scales -------------------------------------------------------------------------------------------
// The factor that values are multiplied by, from a block's largest magnitude; 1 where this is 0, infinite or NaN.
__device__ __forceinline__ float factor_of(float peak) {
  float factor = fminf(__fdiv_rn(kLargest, peak), 3.402823466e38f);
  return peak > 0.f && peak < infinity() ? factor : 1.f;
}
// The scale of a factor, as it is stored.
__device__ __forceinline__ float scale_of(float factor) { return __frcp_rn(factor); }

// ---- Values of q --------------------------------------------------------------------------------------
// Converts four values to q, saturating; the first is the lowest byte.
__device__ __forceinline__ uint32_t packed(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

using Bytes = uint2;
static_assert(sizeof(Bytes) == kValues);

// The code of an infinite value: e5m2 has infinities.
__device__ __forceinline__ uint32_t code_of_infinity(bool is_negative) {
  return 0x7c | (is_negative ? 0x80 : 0);
}

// Quantizes a vector; infinite values saturate here, and are written again later.
template <class Value>
__device__ __forceinline__ Bytes quantized(Value&& x, float factor) {
  uint32_t words[kValues / 4];
  CUTE_UNROLL
  for (int i = 0; i < kValues / 4; ++i) {
    float four[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) four[j] = __fmul_rn(x(4 * i + j), factor);
    words[i] = packed(four[0], four[1], four[2], four[3]);
  }
  return make_uint2(words[0], words[1]);
}

// ---- Groups of rows -----------------------------------------------------------------------------------
// Where a group ends: an offset past the last row of x counts as that.
__device__ __forceinline__ int end_of(const Parameters& p, int group) { return min(p.offsets[group], p.m); }

// ---- Tiles of 128 rows and columns ------------------------------------------------------------------------
// A thread holds kDown rows by kValues columns in registers until x and x.T are quantized.
constexpr int kTile = kColumns, kDown = 8;
static_assert(kDown == kValues && kThreads == kLanes * kLanes);

struct Shared {
  union {
    uint2 q[kTile][kTile / kDown];  // of x.T
    // Of each row of x, and of x.T, by each thread that has a part of it; threads write to different banks.
    X peaks[2][kLanes][kTile + sizeof(uint4) / sizeof(X)];
    float peaks_of_warps[kThreads / 32];
  };
  float factors[2][1][kTile];  // of x and of x.T, for each block of a row
  // For `tile_of_group`: of each warp's groups, and the tile that is found.
  alignas(16) int largest[kThreads / 32];
  int counts[kThreads / 32], at[4];
  alignas(16) bool is_last[2];  // whether a CTA is the last of its rows, and of its columns
};
static_assert(sizeof(Shared) == 18016);

// One register of magnitudes: one value.
using Word = float;
__device__ __forceinline__ float magnitude(float word) { return fabsf(word); }
__device__ __forceinline__ float larger_each(float a, float b) { return larger(a, b); }
constexpr int kWords = kValues * sizeof(X) / sizeof(Word);
__device__ __forceinline__ Word magnitude(const Vector& vector, int i) {
  return magnitude(reinterpret_cast<const Word*>(vector.words)[i]);
}

// Value i of a vector.
__device__ __forceinline__ float value_of(const Vector& vector, int i) {
  return float(vector.values[i]);
}

// Loads what a thread has of a tile; what is past the ends of x are zeros.
__device__ __forceinline__ void load(const Parameters& p, Vector (&x)[kDown], int row0, int column0) {
  const int row = row0 + threadIdx.x / kLanes * kDown, column = column0 + threadIdx.x % kLanes * kValues;
  const bool is_aligned = aligned(p.x, p.x_pitch);
  const X* from = p.x + row * p.x_pitch + column;
  if (is_aligned && row0 + kTile <= p.m && column0 + kTile <= p.n) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, kValues, true);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, from += p.x_pitch) x[i].load(from, row + i < p.m ? p.n - column : 0, is_aligned);
  }
}

// The largest magnitudes of a thread's columns.
__device__ __forceinline__ Vector peaks_of_columns(const Vector (&x)[kDown]) {
  Vector peaks;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i) {
    Word peak = magnitude(x[0], i);
    CUTE_UNROLL
    for (int row = 1; row < kDown; ++row) peak = larger_each(peak, magnitude(x[row], i));
    reinterpret_cast<Word*>(peaks.words)[i] = peak;
  }
  return peaks;
}

// A tile's rows of x, which begin at `row` and are those of one group, and how many tiles all groups have.
struct TileOfGroup {
  int row, end, tiles;
};

// Tiles are those of one group after the other, each of which has whole ones: in q of x.T a tile is where its number
// says, and behind a group's last row are zeros. Tile 0 is there where no group has a row. A thread has some
// consecutive groups; scans find where these begin, an offset below the one before it counting as that, and add up the
// tiles before them. All threads of a CTA must call it. Where asked, it writes where groups end in q of x.T.
__device__ __forceinline__ TileOfGroup tile_of_group(const Parameters& p, Shared& shared, int down, bool writes) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (p.groups + kThreads - 1) / kThreads;
  const int first = min(int(threadIdx.x) * each, p.groups), last = min(first + each, p.groups);
  int largest = 0;
  for (int group = first; group < last; ++group) largest = max(largest, end_of(p, group));
  CUTE_UNROLL
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, largest, apart);
    if (lane >= apart) largest = max(largest, other);
  }
  if (lane == 31) shared.largest[warp] = largest;
  if (threadIdx.x == 0) shared.at[0] = shared.at[1] = 0;
  __syncthreads();
  int start = __shfl_up_sync(~0u, largest, 1);
  if (lane == 0) start = 0;
  for (int i = 0; i < warp; ++i) start = max(start, shared.largest[i]);
  int count = 0;
  for (int group = first, begin = start; group < last; ++group) {
    const int end = max(begin, end_of(p, group));
    count += (end - begin + kTile - 1) / kTile;
    begin = end;
  }
  const int own = count;
  CUTE_UNROLL
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, count, apart);
    if (lane >= apart) count += other;
  }
  if (lane == 31) shared.counts[warp] = count;
  __syncthreads();
  for (int i = 0; i < warp; ++i) count += shared.counts[i];
  int before = count - own;
  for (int group = first; group < last; ++group) {
    const int end = max(start, end_of(p, group)), past = before + (end - start + kTile - 1) / kTile;
    if (before <= down && down < past) shared.at[0] = start + (down - before) * kTile, shared.at[1] = end;
    if (writes) p.ends[group] = past * kTile;
    start = end, before = past;
  }
  if (threadIdx.x == kThreads - 1) shared.at[2] = count;
  __syncthreads();
  return {shared.at[0], shared.at[1], max(1, shared.at[2])};
}
// The same, of its rows.
__device__ __forceinline__ Vector peaks_of_rows(const Vector (&x)[kDown]) {
  Word peaks[kDown];
  CUTE_UNROLL
  for (int row = 0; row < kDown; ++row) {
    peaks[row] = magnitude(x[row], 0);
    CUTE_UNROLL
    for (int i = 1; i < kWords; ++i) peaks[row] = larger_each(peaks[row], magnitude(x[row], i));
  }
  Vector result;
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i)
    reinterpret_cast<Word*>(result.words)[i] = peaks[i];
  return result;
}

__device__ __forceinline__ void write(X* to, const Vector& vector) {
  CUTE_UNROLL
  for (int i = 0; i < Vector::kWords; ++i) reinterpret_cast<uint4*>(to)[i] = vector.words[i];
}

// ---- Factors of rows and columns ----------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cast_sm90a_fp32_e5m2_row_transpose_offsets_256x1_b6452469_factors(const __grid_constant__ Parameters given) {
  wait_for_previous_grid();
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  Parameters p = given;
  const int down = blockIdx.x / p.across, part = blockIdx.x % p.across;
  const TileOfGroup at = tile_of_group(p, shared, down, false);
  if (down >= at.tiles) return;
  p.m = at.end;
  const int tiles_down = at.tiles;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  Vector x[kDown];
  load(p, x, at.row, part * kTile);
  write(&shared.peaks[0][lane][group * kDown], peaks_of_rows(x));
  write(&shared.peaks[1][group][lane * kValues], peaks_of_columns(x));
  __syncthreads();
  // From here on a thread has a row of x, or of x.T, and parts of it, of which the tile is one.
  const int side = threadIdx.x / kTile, row = threadIdx.x % kTile;
  const int rows = (side == 0 ? tiles_down : p.across) * kTile, parts = side == 0 ? p.across : tiles_down;
  const int own = side == 0 ? part : down, above = (side == 0 ? down : part) * kTile + row;
  float peak = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kLanes; ++i) peak = larger(peak, float(shared.peaks[side][i][row]));
  float* peaks = p.peaks + (side == 0 ? 0 : tiles_down * p.across * kTile) + above;
  __stcg(peaks + own * rows, peak);
  __threadfence();
  __syncthreads();
  if (row == 0) {
    unsigned* done = p.done + (side == 0 ? down : tiles_down + part);
    shared.is_last[side] = atomicInc(done, parts - 1) == parts - 1;
  }
  __syncthreads();
  if (!shared.is_last[side]) return;
  __threadfence();  // the last CTA: all others have written theirs
  _Pragma("unroll 8")
  for (int i = 0; i < parts; ++i) peak = larger(peak, __ldcg(peaks + i * rows));
  const float factor = factor_of(peak);
  p.factors[(side == 0 ? 0 : tiles_down * kTile) + above] = factor;
  const int own_row = side == 0 ? at.row + row : above;
  if (own_row < (side == 0 ? p.m : p.n))
    (side == 0 ? p.scale : p.scale_t)[own_row * (side == 0 ? p.scale_down : p.scale_t_down)] = scale_of(factor);
}

// Reads those of the tile.
__device__ __forceinline__ void read_factors(const Parameters& p, Shared& shared, int row0, int column0, int tiles_down) {
  const int side = threadIdx.x / kTile, row = threadIdx.x % kTile, behind = tiles_down * kTile;
  shared.factors[side][0][row] = p.factors[(side == 0 ? row0 : behind + column0) + row];
}

// Where the tile of q of x.T has 8 bytes of a row: those that threads write at once are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return chunk ^ row / kValues; }

// Writes it, whole rows of 128 bytes at a time.
__device__ __forceinline__ void store_transposed(const Parameters& p, const Shared& shared, int column_t, int column0) {
  constexpr int kBytes = sizeof(uint4), kAcross = kTile / kBytes, kRows = kThreads / kAcross;  // at a time
  const bool is_aligned = aligned(p.q_t, p.q_t_pitch);
  const int lane = threadIdx.x % kAcross, first_row = threadIdx.x / kAcross;
  constexpr int columns = kBytes;  // behind a group's last row are zeros
  uint8_t* to = p.q_t + (column0 + first_row) * p.q_t_pitch + column_t + lane * kBytes;
  CUTE_UNROLL
  for (int i = 0; i < kTile / kRows; ++i, to += kRows * p.q_t_pitch) {
    const int row = i * kRows + first_row, first = place(row, 2 * lane);
    const uint4 both = *reinterpret_cast<const uint4*>(&shared.q[row][first & ~1]);
    const uint4 bytes = first % 2 == 0 ? both : make_uint4(both.z, both.w, both.x, both.y);
    if (column0 + row < p.n && columns > 0) store(to, bytes, columns, is_aligned);
  }
}

// Writes infinite values of a thread once more, after all threads have written them as if they were finite.
__device__ __forceinline__ void rewrite_infinities(const Parameters& p, float peak, float factor, int row, int column, int ahead) {
  __syncthreads();
  if (peak < infinity()) return;
  for (int i = row; i < min(row + kDown, p.m); ++i) {
    for (int j = column; j < min(column + kValues, p.n); ++j) {
      const float value = float(p.x[i * p.x_pitch + j]);
      if (fabsf(value) != infinity()) continue;
      const uint8_t code = uint8_t(code_of_infinity((value < 0.f) != (factor < 0.f)));
      p.q[i * p.q_pitch + j] = code;
      p.q_t[j * p.q_t_pitch + i + ahead] = code;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cast_sm90a_fp32_e5m2_row_transpose_offsets_256x1_b6452469(const __grid_constant__ Parameters given) {
  wait_for_previous_grid();
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  [[maybe_unused]] Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  Parameters p = given;
  const int tile = gridDim.x - 1 - blockIdx.x;  // from the end of x, which L2 still has of the launch before
  const int down = tile / p.across, part = tile % p.across;
  const TileOfGroup at = tile_of_group(p, shared, down, tile == 0);
  if (down >= at.tiles) return;
  p.m = at.end;  // past which x counts as zeros
  const int column_t = down * kTile;  // of q of x.T, where the tile begins
  const int row0 = at.row, column0 = part * kTile;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;  // its columns; its rows
  const int row = row0 + group * kDown, column = column0 + lane * kValues;
  const bool is_whole = row0 + kTile <= p.m && column0 + kTile <= p.n;
  const bool q_aligned = aligned(p.q, p.q_pitch);

  Vector x[kDown];
  load(p, x, row0, column0);
  read_factors(p, shared, column_t, column0, at.tiles);
  const Vector of_columns = peaks_of_columns(x);
  const float peak = of_columns.peak();
  __syncthreads();
  const float* factors = &shared.factors[0][0][group * kDown];
  uint2 q[kDown];
  CUTE_UNROLL
  for (int i = 0; i < kDown; ++i) {
    const auto value = [&](int j) { return value_of(x[i], j); };
    q[i] = quantized(value, factors[i]);
  }
  uint8_t* to = p.q + row * p.q_pitch + column;
  if (is_whole && q_aligned) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, to += p.q_pitch) *reinterpret_cast<uint2*>(to) = q[i];
  } else if (column < p.n) {
    CUTE_UNROLL
    for (int i = 0; i < kDown; ++i, to += p.q_pitch)
      if (row + i < p.m) store(to, q[i], p.n - column, q_aligned);
  }
  CUTE_UNROLL  // so that x is not kept as fp32 numbers from here on, which take twice its registers
  for (Vector& vector : x)
    for (uint4& words : vector.words) asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  const float* factors_t = &shared.factors[1][0][lane * kValues];
  CUTE_UNROLL
  for (int j = 0; j < kValues; ++j) {
    const int row_t = lane * kValues + j;
    const auto value = [&](int i) { return value_of(x[i], j); };
    uint2 bytes = quantized(value, factors_t[j]);
    shared.q[row_t][place(row_t, group)] = bytes;
  }
  __syncthreads();
  store_transposed(p, shared, column_t, column0);
  rewrite_infinities(p, peak, 1.f, row, column, column_t - row0);
}
