// mixed_gemm_sm90a_e4m3_uint4_bf16_g64_bf16_64x128x256_wgmma_sums_stages6_stream_k_869d3500
//
// D[m, n] = A[m, k] W[n, k]
//   A e4m3, W uint4 with scales bf16 of groups of 64, applied to sums, accumulated in fp32, D bf16 row
//   tile 64x128x256 by wgmma, 2 consumers, 6 stages, along_n, group 8, store direct
//   the rows of the tensor core are those of W, columns of D, which is D' = W A'
//   stream-K: blocks share the k of tiles that do not fill a wave
// Digest 869d350015bcdb61c8ee1639dfd66a63bf73d5e844974f0fe67b5ce12430f9fe; `warploom show` prints this file.
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
using Value = float;  // what the store converts to ElementD
constexpr int kTileM = 64, kTileN = 128, kTileK = 256;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 1, kClusterSize = kSplit;  // blocks that share a tile's k: a cluster
constexpr int kConsumers = 2;  // warpgroups
constexpr int kShares = 1;     // consumers that share k, each with some slabs of a stage,
constexpr int kSharing = kConsumers / kShares;  // and that share rows of wgmma
constexpr int kWarps = kConsumers * 4, kThreads = 384;  // the rest loads
constexpr int kStages = 6;
constexpr int kGroup = 8;
constexpr int kRows = kTileN, kColumns = kTileM;  // of wgmma in a tile
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // of 64 rows, a consumer's
constexpr int kCount = kColumns / 2;  // accumulators of a thread in 64 rows of wgmma
constexpr int kChunkColumns = 64;  // a block is finished by chunks
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr auto kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;
using Sums = Accumulator[kBlocks][kCount];
using Bank = Accumulator[kBlocks][kCount];  // sums of a group

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  const uint8_t* b;  // W, in slabs
  cutlass::bfloat16_t* d;  // D[m][pitch]
  float* parts;  // sums of parts of tiles, by blocks
  int* raised;  // a flag for each warp of each block that leaves a part
  int64_t d_pitch;  // elements between rows of D
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // products summed
  int32_t cut;  // tiles that are cut: the first
  int32_t row_blocks;  // of 64 rows of W
  int32_t slabs;  // of k, in each of them
};
static_assert(sizeof(Parameters) == 384);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b) == 256 && OFFSET(Parameters, d) == 264);
static_assert(OFFSET(Parameters, parts) == 272 && OFFSET(Parameters, raised) == 280);
static_assert(OFFSET(Parameters, d_pitch) == 288 && OFFSET(Parameters, a_tail_rows) == 296);
static_assert(OFFSET(Parameters, m) == 300 && OFFSET(Parameters, n) == 304);
static_assert(OFFSET(Parameters, k) == 308 && OFFSET(Parameters, cut) == 312);
static_assert(OFFSET(Parameters, row_blocks) == 316 && OFFSET(Parameters, slabs) == 320);

// ---- Parts ----------------------------------------------------------------------------------
// A is K-major: a row of 128 bytes is tile k of one m.
struct OperandA {
  using Load = cute::SM90_TMA_LOAD_2D;
  static constexpr int kBytes = 8192;  // of one stage
  static constexpr int kStep = 32 / 16;  // from one instruction's k to the next, in a descriptor

  // Starts the load of the tile at (m, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k) {
    auto* barrier = reinterpret_cast<uint64_t*>(&full);
    Load::copy(&map, barrier, kEvictNormally, tile, k, m);
  }
};

// W lies in slabs of 64 rows by 128 k, k inside: codes in the order in which threads hold wgmma's A operand,
// 16 bytes of each thread to a piece, then the scales of its groups, rows r and r + 8 side by side.
struct Slab {
  static constexpr int kBytes = 4480, kDepth = 128;
  static constexpr int kPieceBytes = 2048, kPieces = 4096 / kPieceBytes;
  static constexpr int kSteps = kDepth / 32;  // of k, that one instruction multiplies
  static constexpr int kWords = 2;  // of a thread, in one step
  static constexpr int kScales = 4096, kGroups = 2;
  static constexpr int kZeros = kScales + 256;
  static constexpr int kOfStage = kTileK / kDepth;  // along k
  static constexpr int kStageBytes = 4 * kBytes;

  // Starts the load of one block's slabs from `from` on.
  __device__ __forceinline__ static void load(FullBarrier& full, uint8_t* to, const uint8_t* from, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&full)),
          "l"(kEvictFirst)
        : "memory");
  }
};

// A stage has A in panels, each of as much k as one box of TMA's.
constexpr int kPanels = 2, kPanelK = kTileK / kPanels, kSlabPanels = kPanels / Slab::kOfStage;
constexpr int kOfPanel = Slab::kSteps / kSlabPanels;  // steps

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

// Where a tile of D starts.
struct Place {
  int m, n;
};

// The tiles of D in the order in which clusters take them: bands of kGroup tiles along_n, so that
// the operands of tiles in flight stay in L2. Counted in clusters; a block adds its place in its own.
struct Tiles {
  int along, across;  // extents in clusters

  __device__ __forceinline__ explicit Tiles(const Parameters& p)
      : along((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)),
        across((p.m + kTileM * kClusterM - 1) / (kTileM * kClusterM)) {}
  __device__ __forceinline__ int count() const { return along * across; }

  // Where this block's tile starts.
  __device__ __forceinline__ Place at(int index, int rank) const {
    const int band = index / (kGroup * across);
    const int height = min(along - band * kGroup, kGroup);
    const int offset = index - band * kGroup * across;
    const int i = band * kGroup + offset % height, j = offset / height;
    return {(j * kClusterM + rank % kClusterM) * kTileM,
            (i * kClusterN + rank / kClusterM) * kTileN};
  }
};

__device__ __forceinline__ int k_tiles(const Parameters& p) { return (p.k + kTileK - 1) / kTileK; }

// What a cluster computes at a time: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
  __device__ __forceinline__ int k_tiles() const { return end - begin; }
};

// The units of a cluster. The k tiles of the first p.cut tiles, one tile's after the other's, are cut into as
// many ranges as there are clusters, equal but for one k tile; where clusters are a multiple of those tiles,
// all of these are cut at the same k. A cluster walks its own from the last tile to the first: its part of a
// tile that another finishes comes before what it finishes itself, so that each waits for clusters before it
// only, which began before it. Then it takes whole tiles, in turn with the others.
struct Walk {
  int k_tiles, tiles, clusters;
  int shared;     // k tiles of all ranges
  int low, high;  // of the range, what is left
  int whole;      // the next whole tile

  __device__ __forceinline__ Walk(const Parameters& p, int tiles, int k_tiles, int cluster, int clusters)
      : k_tiles(k_tiles),
        tiles(tiles),
        clusters(clusters),
        shared(p.cut * k_tiles),
        low(start(cluster)),
        high(start(cluster + 1)),
        whole(p.cut + cluster) {}

  // The first k tile of a cluster's range.
  __device__ __forceinline__ int start(int cluster) const { return cluster * shared / clusters; }

  // The cluster whose range has the first k tile of a tile that is cut.
  __device__ __forceinline__ int first(int tile) const {
    return ((tile * k_tiles + 1) * clusters - 1) / shared;
  }

  __device__ __forceinline__ bool next(Unit& unit) {
    if (low < high) {
      const int tile = (high - 1) / k_tiles, start = tile * k_tiles;
      unit = {tile, max(low - start, 0), high - start};
      high = start + unit.begin;
      return true;
    }
    unit = {whole, 0, k_tiles};
    whole += clusters;
    return unit.tile < tiles;
  }
};

// A thread holds accumulators in fragments of two rows by two columns. Epilogue and store see a fragment
// only through its logical coordinates in D, never through wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

// The first n and m of a chunk of the consumer's part of the tile, which starts at `at`.
__device__ __forceinline__ int chunk_n(const Place& at, int chunk) {
  return at.n + chunk / kChunks * kWgmmaM;
}
__device__ __forceinline__ int chunk_m(const Place& at, int chunk) {
  return at.m + chunk % kChunks * kChunkColumns;
}

// Where fragment f of a chunk lies: wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, and
// columns 2 (l % 4) and the next of every 8. Its rows are columns of D here.
__device__ __forceinline__ Coordinates coordinates(const Place& at, int chunk, int f) {
  const int lane = threadIdx.x % 32, row = chunk_n(at, chunk) + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = chunk_m(at, chunk) + f * 8 + lane % 4 * 2;
  return { {column, column + 1}, {row, row + 8} };
}

// No steps: the accumulators are D.
struct Epilogue {
  struct Block {};
  struct Operands {};
  __device__ __forceinline__ explicit Epilogue(const Parameters&) {}
  __device__ __forceinline__ Block load_block(const Coordinates&) const { return {}; }
  __device__ __forceinline__ Operands load(const Coordinates&) const { return {}; }
  __device__ __forceinline__ void apply(Value (&)[2][2], const Block&, const Operands&) const {}
};

// Two neighbours in a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Two values of a row as D holds them, rounded to nearest even.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x[1]), "f"(x[0]));
  return reinterpret_cast<const Pair&>(bits);
}

// D leaves from registers, predicated: for pitches and addresses that TMA cannot write.
struct Store {
  __device__ __forceinline__ Store(uint8_t*, int) {}

  // Stores one chunk of the consumer's part of the tile, which starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const Place& at, int chunk) {
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      const Coordinates place = coordinates(at, chunk, f);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (place.row[i] >= p.m) continue;
        ElementD* row = p.d + place.row[i] * p.d_pitch;
        const Pair pair = converted(x[f][i]);
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (place.column[j] < p.n) row[place.column[j]] = pair.value[j];
      }
    }
  }

  __device__ __forceinline__ void finish() const {}
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][kPanels * OperandA::kBytes];  // swizzled rows: a panel starts at 1024 bytes
  alignas(128) uint8_t b[kStages][Slab::kStageBytes];
  FullBarrier full[kStages];    // the bytes of both producers have arrived
  EmptyBarrier empty[kStages];  // every warp that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 206848);

// The sums of a tile that is cut. A cluster that does not have its last k tile leaves its part in memory, as
// its registers have it: each block in a place of its own, since it leaves one part at most. Who has the
// last k tile adds the parts to its own, in the order of k. A warp waits for what the same warps of those
// clusters leave, and for nothing else.
struct Parts {
  struct alignas(16) Fragment { Accumulator value[4]; };  // a thread's share of 64 rows by 8 columns
  static constexpr int kOfRows = kColumns / 8, kOfBlock = kBlocks * kOfRows;
  static constexpr int kThreads = kConsumers * 128;
  static constexpr int kInFlight = 4;  // fragments that a thread reads at a time
  static constexpr int kAtOnce = kOfBlock < kInFlight ? kInFlight / kOfBlock : 1;  // parts,
  static constexpr int kRead = kOfBlock < kInFlight ? kOfBlock : kInFlight;        // and of each of them
  using Sums = Accumulator[kBlocks][kOfRows * 4];
  Fragment* const parts;
  int* const raised;  // by a warp that has left its part, and lowered by the one that has it
  int rank, thread;

  __device__ __forceinline__ Parts(const Parameters& p, int rank, int consumer)
      : parts(reinterpret_cast<Fragment*>(p.parts)),
        raised(p.raised),
        rank(rank),
        thread(consumer * 128 + threadIdx.x % 128) {}

  __device__ __forceinline__ Fragment* place(int cluster, int fragment) const {
    return parts + ((cluster * kClusterSize + rank) * kOfBlock + fragment) * kThreads + thread;
  }
  __device__ __forceinline__ int* flag(int cluster) const {
    return raised + (cluster * kClusterSize + rank) * (kThreads / 32) + thread / 32;
  }

  // Leaves the part of this block, which is of `cluster`.
  __device__ __forceinline__ void leave(const Sums& sums, int cluster) const {
    CUTE_UNROLL
    for (int i = 0; i < kOfBlock; ++i) {
      const Accumulator* const sum = sums[i / kOfRows] + i % kOfRows * 4;
      *place(cluster, i) = {sum[0], sum[1], sum[2], sum[3]};
    }
    __syncwarp();  // what all lanes have written is there for who sees the flag
    if (threadIdx.x % 32 == 0)
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag(cluster)) : "memory");
  }

  // From L2, where other multiprocessors have left it.
  __device__ __forceinline__ static Fragment read(const Fragment* from) {
    Fragment found;
    asm volatile("ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(found.value[0]), "=f"(found.value[1]), "=f"(found.value[2]), "=f"(found.value[3])
                 : "l"(from)
                 : "memory");
    return found;
  }

  // Adds the parts that the clusters from `first` to `last` leave of the tile that this one finishes.
  __device__ __forceinline__ void add(Sums& sums, int first, int last) const {
    for (int other = first + int(threadIdx.x % 32); other < last; other += 32) {
      int up;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(up) : "l"(flag(other)) : "memory");
      while (up == 0);
      *flag(other) = 0;  // as the next launch must find it
    }
    __syncwarp();
    CUTE_NO_UNROLL
    for (int other = first; other < last; other += kAtOnce) {
      CUTE_UNROLL
      for (int begin = 0; begin < kOfBlock; begin += kRead) {
        Fragment found[kAtOnce][kRead];
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce * kRead; ++i)
          if (other + i / kRead < last && begin + i % kRead < kOfBlock)
            found[i / kRead][i % kRead] = read(place(other + i / kRead, begin + i % kRead));
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce * kRead; ++i) {
          const int fragment = begin + i % kRead;
          if (other + i / kRead < last && fragment < kOfBlock) {
            Accumulator* const sum = sums[fragment / kOfRows] + fragment % kOfRows * 4;
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) sum[j] += found[i / kRead][i % kRead].value[j];
          }
        }
      }
    }
  }
};

// What comes before this may run under the kernel before, and the next kernel's under this one.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Producer: two threads keep the ring of stages full ------------------------------------------
// What a block loads: the k tiles of one unit after the other.
struct Loads {
  const Tiles tiles;
  Walk walk;
  Unit unit{0, 0, 0};
  Place at;    // of the unit in D
  int k_tile;  // the one to load

  __device__ __forceinline__ Loads(const Parameters& p, int cluster, int clusters)
      : tiles(p), walk(p, tiles.count(), k_tiles(p), cluster, clusters), at(tiles.at(0, 0)) {}

  __device__ __forceinline__ bool next() {
    if (unit.begin >= unit.end) {
      if (!walk.next(unit)) return false;
      at = tiles.at(unit.tile, 0);
    }
    k_tile = unit.begin++;
    return true;
  }
};

// Loads slabs. No launch writes weights that one after it reads, so that the first arrive under the launch
// before, whose D may be A. What lies past the last block of rows is not stored, and past the end of k A is
// zero: there any slab will do.
__device__ __forceinline__ void load_slabs(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  const int64_t pitch = int64_t(p.slabs) * Slab::kBytes;  // of blocks of rows
  CUTE_NO_UNROLL
  for (Loads loads(p, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const int first = loads.k_tile * Slab::kOfStage;
    const int there = min(p.slabs - first, Slab::kOfStage);
    const int row_block = loads.at.n / kWgmmaM, last = p.row_blocks - 1 - row_block;
    const uint8_t* from = p.b + row_block * pitch + first * Slab::kBytes;
    uint8_t* to = shared.b[position.stage];
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx(Slab::kStageBytes);
    CUTE_UNROLL
    for (int i = 0; i < kRows / kWgmmaM; ++i) {
      Slab::load(full, to, from, there * Slab::kBytes);
      for (int slab = there; slab < Slab::kOfStage; ++slab) Slab::load(full, to + slab * Slab::kBytes, from, Slab::kBytes);
      to += Slab::kOfStage * Slab::kBytes;
      if (i < last) from += pitch;
    }
  }
}

// Loads A, once the launch before is done.
__device__ __forceinline__ void load_a(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  wait_for_launch_before();
  Position position{0, 1};
  CUTE_NO_UNROLL
  for (Loads loads(p, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const bool tail = p.m - loads.at.m < kTileM;  // rows past the end would take as long as any, for nothing
    const cute::TmaDescriptor& map = tail ? p.a_tail_map : p.a_map;
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx((tail ? p.a_tail_rows : kTileM) * (kPanels * OperandA::kBytes / kTileM));
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel)
      OperandA::load(map, full, shared.a[position.stage] + panel * OperandA::kBytes, loads.at.m,
                     loads.k_tile * kTileK + panel * kPanelK);
  }
}

// Each is of a warp of its own, so that neither waits for the other.
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  if (threadIdx.x == kWarps * 32) load_slabs(p, shared, cluster, clusters);
  if (threadIdx.x == kWarps * 32 + 32) load_a(p, shared, cluster, clusters);
}

// ---- Decoding and products ------------------------------------------------------------------------
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

// uint4 by e4m3: exact (q - z) / kUnit; the scale is left to the sums. Bits 0 to 3 of e4m3 are an integer n
// that means n 2^-9, as 16 does too. With 128 more no byte borrows from the next, and its sign is that of q - z,
// turned round: PRMT makes a mask of it, by which what is negative becomes its size and a sign.
struct Decode {
  static constexpr int kWords = 2;
  static constexpr float kUnit = 512;
  uint32_t zero[2];  // of a row, in each byte

  __device__ __forceinline__ Decode(uint32_t, uint32_t zeros) {
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

// What a thread has of a group: the scales of its rows r and r + 8, and their zero points, a byte each.
struct Group {
  uint32_t scales;
  uint32_t zeros;

  // Of the slab at `slab`, which has both rows' side by side.
  __device__ __forceinline__ void read(uint32_t slab, int group) {
    const int place = group * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    const uint32_t address = slab + Slab::kScales + place * 2;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(address));
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(zeros) : "r"(slab + Slab::kZeros + place));
  }

  __device__ __forceinline__ float low() const { return __uint_as_float(scales << 16); }
  __device__ __forceinline__ float high() const { return __uint_as_float(scales & 0xffff0000); }

  __device__ __forceinline__ Decode decode() const {
    return Decode(0, zeros);
  }
};

// What a thread has of a slab's codes, step by step.
struct Codes {
  uint32_t words[Slab::kSteps][Slab::kWords];

  __device__ __forceinline__ void read(uint32_t slab, int piece) {
    uint32_t* const to = words[0] + piece * 4;
    asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(slab + piece * Slab::kPieceBytes + threadIdx.x % 128 * 16));
  }
};
static_assert(Decode::kWords == Slab::kWords);

// A warp lets go of a stage, if there is one; without a branch, which would serialise wgmma.
__device__ __forceinline__ void release(EmptyBarrier& empty, bool there = true) {
  __syncwarp();
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                   cute::cast_smem_ptr_to_uint(&empty)),
               "r"(int(there && threadIdx.x % 32 == 0))
               : "memory");
}

__device__ __forceinline__ void clear(Sums& sums) {
  CUTE_UNROLL
  for (int i = 0; i < kBlocks * kCount; ++i) sums[i / kCount][i % kCount] = 0;
}

// Adds sums of a group, times the scales.
__device__ __forceinline__ void promote(Sums& sums, const Bank& part, const Group (&group)[kBlocks]) {
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    const float low = group[block].low() * Decode::kUnit, high = group[block].high() * Decode::kUnit;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) sums[block][i] += (i % 4 < 2 ? low : high) * part[block][i];
  }
}

// D[64 x 64] += A[64 x 32] * B[32 x 64]; A in registers, B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 32;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// The sums of one unit's products, by wgmma: weights are decoded into registers while the tensor core
// multiplies what was decoded before.
struct Products {
  static constexpr int kIssued = 2;  // steps that are issued together, of each block of rows
  static constexpr int kIssues = Slab::kSteps / kIssued;  // of a slab
  static constexpr int kOfGroup = kIssues / Slab::kGroups;
  static constexpr int kBanks = Slab::kOfStage / kShares * Slab::kGroups;  // groups of a stage take banks in turn
  Sums sums;
  Bank banks[2];
  Group pending[kBlocks];  // the group before
  uint64_t panels;  // of the first stage, as wgmma is told of them

  __device__ __forceinline__ explicit Products(const uint8_t* a)
      : panels(matrix(a, 0, 1024, 1)) {}

  // Keeps the compiler from moving sums across asynchronous products.
  __device__ __forceinline__ static void fence(Bank& held) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) asm volatile("" : "+f"(held[i / kCount][i % kCount])::"memory");
  }

  // Issues the products of a slab of each block of rows; the last are under way when it returns. `own`: its
  // number among the consumer's of the stage. The stage before, if one is held, is done with meanwhile.
  __device__ __forceinline__ void add(uint64_t a, uint32_t slabs, int own, EmptyBarrier& previous, bool held) {
    Codes codes[kBlocks];
    Group group[kBlocks];
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTE_UNROLL
      for (int piece = 0; piece < Slab::kPieces; ++piece)
        codes[block].read(slabs + block * Slab::kOfStage * Slab::kBytes, piece);
    }
    CUTE_UNROLL
    for (int issue = 0; issue < kIssues; ++issue) {
      constexpr int kEach = kIssues / Slab::kGroups;
      if (issue % kEach == 0) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block)
          group[block].read(slabs + block * Slab::kOfStage * Slab::kBytes, issue / kEach);
      }
      uint32_t registers[kBlocks][kIssued][4];
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks; ++i) {
        const int block = i % kBlocks, step = issue * kIssued + i / kBlocks;
        group[block].decode().step(codes[block].words[step], registers[block][i / kBlocks]);
      }
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks * 4; ++i)  // complete before the products begin
        asm volatile("" : "+r"(registers[i % kBlocks][i / kBlocks / 4][i / kBlocks % 4])::"memory");
      const int bank = own * Slab::kGroups + issue / kOfGroup;
      Bank& into = banks[bank % 2];
      fence(into);
      cute::warpgroup_arrive();
      CUTE_UNROLL
      for (int i = 0; i < kIssued; ++i) {
        const int step = issue * kIssued + i;
        const uint64_t at = a + step / kOfPanel * (OperandA::kBytes / 16) + step % kOfPanel * OperandA::kStep;
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block)
          Wgmma::fma(registers[block][i], at, into[block], issue % kOfGroup != 0 || i > 0);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // what was issued before is done: its registers may be overwritten
      if (issue % kOfGroup == 0) {
        if (bank > 0) {
          fence(banks[1 - bank % 2]);
          promote(sums, banks[1 - bank % 2], pending);
        }
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) pending[block] = group[block];
      }
    }
  }

  // Multiplies `count` stages, one at least, and lets go of them. The consumer has these rows of the tile, and
  // this share of k.
  __device__ __forceinline__ void run(SharedStorage& shared, Position& position, int count, int rows, int share) {
    clear(sums);
    int i = 0, previous = position.stage;
    CUTE_NO_UNROLL
    do {  // a loop that may end at once would serialise wgmma
      shared.full[position.stage].wait(position.phase);
      const int stage = __shfl_sync(~0u, position.stage, 0);  // tells the compiler that it is uniform
      const uint64_t a = panels + stage * (kPanels * OperandA::kBytes / 16);
      const uint32_t slabs =
          cute::cast_smem_ptr_to_uint(shared.b[stage]) + rows * kBlocks * Slab::kOfStage * Slab::kBytes;
      CUTE_UNROLL
      for (int own = 0; own < Slab::kOfStage / kShares; ++own) {
        const int slab = own * kShares + share;
        add(a + slab * kSlabPanels * (OperandA::kBytes / 16), slabs + slab * Slab::kBytes, own, shared.empty[previous],
            i > 0);
      }
      // The compiler follows a bank through a stage, but not from one to the next.
      cute::warpgroup_wait<0>();
      fence(banks[1 - kBanks % 2]);
      release(shared.empty[position.stage]);
      promote(sums, banks[1 - kBanks % 2], pending);
      previous = position.stage;
      position.advance();
    } while (++i < count);
  }
};

// ---- Consumer: products of its rows of the tile and its share of k, then their epilogue and store ---------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank, int cluster,
                                        int clusters) {
  wait_for_launch_before();
  const Tiles tiles(p);
  const int rows = consumer / kShares, share = consumer % kShares;
  Position position{0, 0};
  Products products(shared.a[0]);
  Store store(nullptr, consumer);
  Epilogue epilogue(p);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  const Parts parts(p, rank, consumer);
  Walk walk(p, tiles.count(), k_tiles(p), cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    Place at = tiles.at(unit.tile, 0);
    at.n += rows * kBlocks * kWgmmaM;
    products.run(shared, position, unit.end - unit.begin, rows, share);
    if (unit.end < walk.k_tiles) {
      parts.leave(products.sums, cluster);
      continue;
    }
    if (unit.begin > 0) parts.add(products.sums, walk.first(unit.tile), cluster);
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) block[i] = epilogue.load_block(coordinates(at, i * kChunks, 0));
    CUTE_UNROLL
    for (int f = 0; f < kFragments; ++f) operands[f] = epilogue.load(coordinates(at, 0, f));
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      const int next = chunk + 1;
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i % 2][i / 2] = Value(products.sums[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f], block[chunk / kChunks], operands[f]);
        if (next < kBlocks * kChunks) operands[f] = epilogue.load(coordinates(at, next, f));
      }
      store(p, x, at, chunk);
    }
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mixed_gemm_sm90a_e4m3_uint4_bf16_g64_bf16_64x128x256_wgmma_sums_stages6_stream_k_869d3500(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that it is uniform
  const int rank = 0;
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == kWarps * 32) {
    for (const auto* map : {&p.a_map, &p.a_tail_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(2);  // who loads slabs, and who loads A
      shared.empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (warp >= kWarps) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    produce(p, shared, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warp / 4, rank, cluster, clusters);
  }
}
