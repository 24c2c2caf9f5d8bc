// fp32_pieces_sm90a_fp16x2_col_256_931c0ecb
//
// 2 pieces of fp32 x [m, k] in 16 bits, the highest first, side by side along k
//   fp16 pieces of x times a power of two for each row, which brings its largest finite magnitude to [2^14, 2^15)
//   x is transposed: its rows are contiguous; 256 threads a CTA
// Two kernels: peaks, of parts of rows, and main, which reads them.
// Digest 931c0ecbce10a3d98b85630cedf623eaede2a9ffd6948422403d2605b57a5d12; `warploom show` prints this file.
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

using Piece = cutlass::half_t;
constexpr int kThreads = 256, kPieces = 2;
constexpr int kValues = 8;  // of a row, that a thread splits at once: of each piece 16 bytes

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const float* x;  // [m][x_pitch], or [k][x_pitch] of layout col
  uint16_t* q;  // [m][count][place]: pieces
  float* scale;  // [3][m]: x is the sum of its pieces times the first two, or the third
  uint32_t* span;  // [4]: most small or lost values of a row, most lost, k
  uint32_t* maxima;  // [3]: of span so far, and the CTAs that raised them
  uint64_t* sums;  // [m / 64]: small and lost values, tiles above bit 34
  float* peaks;  // [parts][m]: largest magnitudes of parts of rows
  int64_t x_pitch;  // elements between rows of x
  int32_t m;  // rows
  int32_t k;  // columns
  int32_t piece_pitch;  // elements between pieces of a row
  int32_t across;  // tiles along k
  int32_t part;  // columns along k of a part
  int32_t parts;  // of k
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, x) == 0 && OFFSET(Parameters, q) == 8);
static_assert(OFFSET(Parameters, scale) == 16 && OFFSET(Parameters, span) == 24);
static_assert(OFFSET(Parameters, maxima) == 32 && OFFSET(Parameters, sums) == 40);
static_assert(OFFSET(Parameters, peaks) == 48 && OFFSET(Parameters, x_pitch) == 56);
static_assert(OFFSET(Parameters, m) == 64 && OFFSET(Parameters, k) == 68);
static_assert(OFFSET(Parameters, piece_pitch) == 72 && OFFSET(Parameters, across) == 76);
static_assert(OFFSET(Parameters, part) == 80 && OFFSET(Parameters, parts) == 84);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- The pieces of a value ------------------------------------------------------------------------------
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000) != 0x7f800000; }

// The bits of |x|, which are in its order; 0 of what is not finite.
__device__ __forceinline__ uint32_t magnitude(float x) { return is_finite(x) ? __float_as_uint(x) & 0x7fffffff : 0; }

// The biased exponent of the power of two that a row is multiplied by, from the bits of its largest magnitude: of
// 2^126 at most, whose inverse is normal.
__device__ __forceinline__ uint32_t factor_exponent(uint32_t peak) {
  return peak == 0 ? 127 : min(268 - (peak >> 23), 253u);
}

// Writes the inverse of a row's factor as two factors, and as one number. Accumulators are multiplied by the first
// factor of A's row, by the number of B's row, and by the second factor of A's: none of these products overflows
// where the result does not.
__device__ __forceinline__ void write_scale(const Parameters& p, int row, uint32_t exponent) {
  const uint32_t inverse = 254 - exponent, first = min(inverse, 191u);
  p.scale[row] = __uint_as_float(first << 23);
  p.scale[p.m + row] = __uint_as_float((inverse - first + 127) << 23);
  p.scale[2 * int64_t(p.m) + row] = __uint_as_float(inverse << 23);
}

// ---- Whether two fp16 pieces hold the values of all rows ------------------------------------------------
// How many values of a row are small, below 2^-7 of its largest, and how many are lost: their pieces lack bits.
struct Counts {
  int small = 0, lost = 0;

  __device__ __forceinline__ void add(float scaled, float left, float level) {
    small += fabsf(scaled) < level;
    lost += left != 0.f && fabsf(scaled) < 0.25f;  // of a larger one the pieces miss at most 2^-23
  }
};

// The threshold of a row's small values: 2^-7 times its largest magnitude rounded down to a power of two.
__device__ __forceinline__ float small_level(uint32_t peak, float factor) {
  const float scaled = __uint_as_float(peak) * factor;  // 2^-23 or more
  return peak == 0 ? 0.f : __uint_as_float((__float_as_uint(scaled) & 0x7f800000) - (7 << 23));
}

// Raises the maxima over all rows to the counts of some rows. The last of the launch's `calls` writes them to p.span,
// from which GEMMs decide whether the one of fp16 or that of bf16 pieces computes D, and clears them.
__device__ __forceinline__ void raise_span(const Parameters& p, uint32_t most, uint32_t most_lost, uint32_t calls) {
  atomicMax(p.maxima, most);
  if (most_lost > 0) atomicMax(p.maxima + 1, most_lost);
  __threadfence();
  if (atomicAdd(p.maxima + 2, 1u) + 1 < calls) return;
  __threadfence();
  p.span[0] = atomicExch(p.maxima, 0u);
  p.span[1] = atomicExch(p.maxima + 1, 0u);
  p.span[2] = uint32_t(p.k);
  p.span[3] = 0;
  p.maxima[2] = 0;
}

// Pieces of values of a row.
struct Pieces {
  uint16_t bits[kPieces][kValues];

  // What is not finite has a first piece alone: the difference from it would be NaN.
  __device__ __forceinline__ void split(int i, float x, float factor, float level, Counts& counts) {
    const bool finite = is_finite(x);
    float rest = x * factor;
    const float scaled = rest;
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      Piece rounded(rest);
      bits[piece][i] = rounded.raw();
      rest = finite ? rest - float(rounded) : 0.f;
    }
    counts.add(scaled, rest, level);
  }

  // Writes them to a row of q, from a column on that is a multiple of kValues.
  __device__ __forceinline__ void store(const Parameters& p, int row, int column) const {
    uint16_t* const to = p.q + int64_t(row) * kPieces * p.piece_pitch + column;
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t words[kValues / 2];
      CUTE_UNROLL
      for (int i = 0; i < kValues / 2; ++i) words[i] = bits[piece][2 * i] | uint32_t(bits[piece][2 * i + 1]) << 16;
      *reinterpret_cast<uint4*>(to + piece * p.piece_pitch) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// ---- Rows across k: a CTA transposes a tile in shared memory ---------------------------------------------
constexpr int kTile = 64, kLines = kThreads / kTile;  // columns of a tile that are loaded at once
constexpr int kVectors = kTile / kValues;  // of a row of a tile
using Tile = float[kTile][kTile + 1];  // a column of x, and a value of padding against bank conflicts

// Loads a tile, in which rows are adjacent; what is outside of x is 0.
__device__ __forceinline__ void load(Tile& tile, const Parameters& p, int row0, int column0) {
  const int own = threadIdx.x % kTile;
  CUTE_UNROLL
  for (int i = threadIdx.x / kTile; i < kTile; i += kLines) {
    const bool inside = row0 + own < p.m && column0 + i < p.k;
    tile[i][own] = inside ? p.x[(column0 + i) * p.x_pitch + row0 + own] : 0.f;
  }
}
constexpr int kPeakRows = 32, kWarps = kThreads / 32;

// The largest magnitudes of 32 rows in a part of k: a lane has a row, and a warp every kWarps-th column of it.
extern "C" __global__ void __launch_bounds__(kThreads)
    fp32_pieces_sm90a_fp16x2_col_256_931c0ecb_peaks(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  __shared__ uint32_t peaks[kWarps][kPeakRows];
  const int part = blockIdx.x % p.parts, lane = threadIdx.x % kPeakRows, warp = threadIdx.x / kPeakRows;
  const int row = blockIdx.x / p.parts * kPeakRows + lane, last = min(p.k, (part + 1) * p.part);
  uint32_t peak = 0;
  if (row < p.m) {
#pragma unroll 8
    for (int column = part * p.part + warp; column < last; column += kWarps)
      peak = max(peak, magnitude(p.x[column * p.x_pitch + row]));
  }
  peaks[warp][lane] = peak;
  __syncthreads();
  if (warp > 0 || row >= p.m) return;
  CUTE_UNROLL
  for (int i = 1; i < kWarps; ++i) peak = max(peak, peaks[i][lane]);
  p.peaks[int64_t(part) * p.m + row] = __uint_as_float(peak);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fp32_pieces_sm90a_fp16x2_col_256_931c0ecb(const __grid_constant__ Parameters p) {
  wait_for_previous_grid();
  __shared__ Tile tile;
  __shared__ float factors[kTile], levels[kTile];
  __shared__ int small[kTile], lost[kTile];  // values of each row in this tile
  const int row0 = blockIdx.x / p.across * kTile, column0 = blockIdx.x % p.across * kTile;
  const int own = threadIdx.x % kTile;
  load(tile, p, row0, column0);
  if (threadIdx.x < kTile && row0 + own < p.m) {
    uint32_t peak = 0;
    for (int part = 0; part < p.parts; ++part)
      peak = max(peak, __float_as_uint(p.peaks[int64_t(part) * p.m + row0 + own]));
    const uint32_t exponent = factor_exponent(peak);
    factors[own] = __uint_as_float(exponent << 23);
    levels[own] = small_level(peak, factors[own]);
    if (column0 == 0) write_scale(p, row0 + own, exponent);
  }
  if (threadIdx.x < kTile) small[own] = lost[own] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * kValues;
    if (row0 + row >= p.m || column0 + column >= p.piece_pitch) continue;
    Pieces pieces;
    Counts counts;
    CUTE_UNROLL
    for (int j = 0; j < kValues; ++j) pieces.split(j, tile[column + j][row], factors[row], levels[row], counts);
    pieces.store(p, row0 + row, column0 + column);
    atomicAdd(&small[row], counts.small);
    if (counts.lost > 0) atomicAdd(&lost[row], counts.lost);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  // The largest counts of any row in this tile. Their sum over all tiles of these rows, which the CTA that comes
  // last goes on with, is at least the largest count of a whole row.
  const int past = max(0, column0 + kTile - p.k);  // zeros past k were counted as small
  int most = 0, most_lost = 0;
  CUTE_UNROLL
  for (int row = threadIdx.x; row < kTile; row += 32) {
    most = max(most, small[row] - past + lost[row]);
    most_lost = max(most_lost, lost[row]);
  }
  most = __reduce_max_sync(0xffffffff, most);
  most_lost = __reduce_max_sync(0xffffffff, most_lost);
  if (threadIdx.x > 0) return;
  if (most_lost > 0) atomicMax(p.maxima + 1, uint32_t(most_lost));
  __threadfence();
  uint64_t* const sums = p.sums + row0 / kTile;  // bits 0 to 33: the sum; from 34 on: how many tiles it is of
  const uint64_t before = atomicAdd(reinterpret_cast<unsigned long long*>(sums), 1ull << 34 | uint64_t(most));
  if ((before >> 34) + 1 < p.across) return;
  *sums = 0;
  const uint64_t sum = (before & ((1ull << 34) - 1)) + most;
  raise_span(p, uint32_t(min(sum, uint64_t(0xffffffff))), 0, (p.m + kTile - 1) / kTile);
}
