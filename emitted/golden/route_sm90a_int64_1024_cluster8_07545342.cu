// route_sm90a_int64_1024_cluster8_07545342
//
// Pairs of a token and an expert that it chose, sorted by expert: a histogram, a scan, and a stable permutation.
//   ids int64 [tokens][k]; pair token * k + choice
//   offsets[expert] = the end of the expert's rows, order[row] = its pair, inverse[pair] = its row
// Pairs whose id is no expert of this process have no row (-1), and come last in order.
//   8 CTAs of a cluster of 1024 threads; a warp sorts consecutive pairs
// Digest 07545342518abcd6773fd143eb1dadfe8075a5476910252433fab577bded2298; `warploom show` prints this file.
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

using Id = int64_t;
// kPairs: ids that a thread loads before it uses the first.
constexpr int kThreads = 1024, kWarps = kThreads / 32, kPairs = 4;
constexpr int kCluster = 8;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  const int64_t* ids;  // [tokens][k]: experts of each token
  int32_t* offsets;  // [experts]: the end of the rows of each
  int32_t* order;  // [pairs]: the pair that each row is of
  int32_t* inverse;  // [pairs]: the row of each pair; -1 of skipped ones
  int64_t token_step;  // elements of ids from token to token
  int64_t choice_step;  // from choice to choice
  int64_t first;  // the id of the first expert
  int32_t pairs;  // of a token and an expert
  int32_t choices;  // of a token: k
  int32_t experts;  // of which there are rows
  int32_t bits;  // of the number of experts
  int32_t slice;  // pairs of a warp
};
static_assert(sizeof(Parameters) == 128);
static_assert(OFFSET(Parameters, ids) == 0 && OFFSET(Parameters, offsets) == 8);
static_assert(OFFSET(Parameters, order) == 16 && OFFSET(Parameters, inverse) == 24);
static_assert(OFFSET(Parameters, token_step) == 32 && OFFSET(Parameters, choice_step) == 40);
static_assert(OFFSET(Parameters, first) == 48 && OFFSET(Parameters, pairs) == 56);
static_assert(OFFSET(Parameters, choices) == 60 && OFFSET(Parameters, experts) == 64);
static_assert(OFFSET(Parameters, bits) == 68 && OFFSET(Parameters, slice) == 72);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// The expert of a pair, from 0 for this process's first; p.experts for ids of other processes.
__device__ __forceinline__ int expert_of(const Parameters& p, int pair) {
  const uint32_t token = uint32_t(pair) / uint32_t(p.choices), choice = uint32_t(pair) - token * uint32_t(p.choices);
  const int64_t id = p.ids[token * p.token_step + choice * p.choice_step];
  const uint64_t expert = uint64_t(id) - uint64_t(p.first);  // unsigned: ids before the first wrap, past any
  return expert < uint64_t(p.experts) ? int(expert) : p.experts;
}

// The lanes with the same expert, by a ballot for each bit of its number: __match_any_sync takes a step
// for each expert in the warp.
__device__ __forceinline__ unsigned lanes_of(const Parameters& p, int expert) {
  unsigned lanes = __ballot_sync(~0u, expert >= 0);
  for (int bit = 0; bit < p.bits; ++bit) {
    const bool is_set = expert >> bit & 1;
    const unsigned set = __ballot_sync(~0u, is_set);
    lanes &= is_set ? set : ~set;
  }
  return lanes;
}

// Calls `visit` with the pairs of a warp in order; a lane loads kPairs of them before the first call. All
// lanes call it: past the end the expert is -1.
template <class Visit> __device__ __forceinline__ void for_each(const Parameters& p, int begin, int end, Visit visit) {
  const int lane = threadIdx.x % 32;
  for (int base = begin; base < end; base += 32 * kPairs) {
    int experts[kPairs];
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int pair = base + i * 32 + lane;
      experts[i] = pair < end ? expert_of(p, pair) : -1;
    }
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) visit(base + i * 32 + lane, experts[i]);
  }
}

// Reads the counterpart of `own` in the shared memory of another CTA of the cluster.
__device__ __forceinline__ int count_of(const int* own, int rank) {
  int count;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
               "ld.shared::cluster.u32 %0, [there];\n}"
               : "=r"(count)
               : "r"(cute::cast_smem_ptr_to_uint(own)), "r"(rank)
               : "memory");
  return count;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    route_sm90a_int64_1024_cluster8_07545342(const __grid_constant__ Parameters p) {
  extern __shared__ int shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int bins = p.experts + 1;  // the last bin is of pairs without a row
  int* const counts = shared;  // [kWarps][bins]: pairs of each warp, then of the warps before it
  int* const totals = counts + kWarps * bins;  // [bins]: pairs of this CTA
  int* const starts = totals + bins;  // [bins]: the first row of this CTA's pairs
  int* const sums = starts + bins;  // [kWarps]: pairs of the experts that a warp scans
  int* const mine = counts + warp * bins;
  const int rank = cute::block_rank_in_cluster();
  for (int i = threadIdx.x; i < kWarps * bins; i += kThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_grid();

  // 1. Each warp counts its pairs by expert.
  const int begin = min((rank * kWarps + warp) * p.slice, p.pairs), end = min(begin + p.slice, p.pairs);
  for_each(p, begin, end, [&](int, int expert) {
    if (expert >= 0) atomicAdd(mine + expert, 1);
  });
  __syncthreads();

  // 2. The scan: over the warps of an expert, then over experts and CTAs.
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int total = 0;
    CUTE_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      const int count = counts[i * bins + bin];
      counts[i * bins + bin] = total;
      total += count;
    }
    totals[bin] = total;
  }
  cute::cluster_arrive();
  cute::cluster_wait();  // the totals of all CTAs are written
  int done = 0;  // pairs of the experts that were scanned
  for (int base = 0; base < bins; base += kThreads) {
    const int bin = base + threadIdx.x;
    int before = 0, all = 0;  // pairs of the expert: in CTAs before this one, and in every one
    if (bin < bins) {
      CUTE_UNROLL
      for (int i = 0; i < kCluster; ++i) {
        const int count = count_of(totals + bin, i);
        before += i < rank ? count : 0;
        all += count;
      }
    }
    int last = all;  // the end of the expert's rows
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(~0u, last, step);
      last += lane >= step ? left : 0;
    }
    if (lane == 31) sums[warp] = last;
    __syncthreads();
    last += done;
    CUTE_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      last += i < warp ? sums[i] : 0;
      done += sums[i];
    }
    if (bin < bins) starts[bin] = last - all + before;
    if (bin < p.experts && rank == 0) p.offsets[bin] = last;
    __syncthreads();  // sums may be overwritten, and starts be read
  }
  cute::cluster_arrive();  // this CTA has read the totals of the others

  // 3. Each warp gives its pairs their rows, in order.
  for_each(p, begin, end, [&](int pair, int expert) {
    const unsigned alike = lanes_of(p, expert);
    const int ahead = __popc(alike & ((1u << lane) - 1));  // pairs of the same expert in lanes before
    const int row = expert < 0 ? 0 : starts[expert] + mine[expert] + ahead;
    __syncwarp();
    if (expert >= 0 && ahead == 0) mine[expert] += __popc(alike);
    __syncwarp();
    if (expert >= 0) {
      p.order[row] = pair;
      p.inverse[pair] = expert < p.experts ? row : -1;
    }
  });
  cute::cluster_wait();  // no CTA exits while another may read its totals
}
