// mixed_gemm_sm90a_bf16_uint4_bf16_g0_bf16_groups_rows_64x128x128_wgmma_sums_stages9_along_m_636aa944
//
// D[m, n] = A[m, k] W[n, k]
//   A bf16, W uint4 with scales bf16 per channel, applied to sums, accumulated in fp32, D bf16 row
//   tile 64x128x128 by wgmma, 2 consumers, 9 stages, along_m, group 8, store direct
//   the rows of the tensor core are those of W, columns of D, which is D' = W A'
//   rows of A and D in groups that end at offsets in device memory, and a W for each group
// Digest 636aa944bb8750770c806530d5faa05d04d5551c868e86bc6bd9228c6068bc41; `warploom show` prints this file.
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
constexpr int kTileM = 64, kTileN = 128, kTileK = 128;
constexpr int kClusterM = 1, kClusterN = 1;
constexpr int kSplit = 1, kClusterSize = kSplit;  // blocks that share a tile's k: a cluster
constexpr int kConsumers = 2;  // warpgroups
constexpr int kShares = 1;     // consumers that share k, each with some slabs of a stage,
constexpr int kSharing = kConsumers / kShares;  // and that share rows of wgmma
constexpr int kWarps = kConsumers * 4, kThreads = 384;  // the rest loads
constexpr int kStages = 9;
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

// Packed by the host: these assertions are what keeps the two sides together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  const uint8_t* b;  // W, in slabs
  const cutlass::bfloat16_t* channel_scales;  // of rows of W
  const uint8_t* channel_zeros;  // likewise
  cutlass::bfloat16_t* d;  // D[m][pitch]
  const int* offsets;  // where each group of rows ends
  int64_t d_pitch;  // elements between rows of D
  int64_t d_batch;  // elements between batches of D
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // products summed
  int32_t batches;  // groups
  int32_t row_blocks;  // of 64 rows of W
  int32_t slabs;  // of k, in each of them
};
static_assert(sizeof(Parameters) == 256);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, b) == 128);
static_assert(OFFSET(Parameters, channel_scales) == 136 && OFFSET(Parameters, channel_zeros) == 144);
static_assert(OFFSET(Parameters, d) == 152 && OFFSET(Parameters, offsets) == 160);
static_assert(OFFSET(Parameters, d_pitch) == 168 && OFFSET(Parameters, d_batch) == 176);
static_assert(OFFSET(Parameters, m) == 184 && OFFSET(Parameters, n) == 188);
static_assert(OFFSET(Parameters, k) == 192 && OFFSET(Parameters, batches) == 196);
static_assert(OFFSET(Parameters, row_blocks) == 200 && OFFSET(Parameters, slabs) == 204);

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
  static constexpr int kBytes = 4096, kDepth = 128;
  static constexpr int kPieceBytes = 2048, kPieces = 4096 / kPieceBytes;
  static constexpr int kSteps = kDepth / 16;  // of k, that one instruction multiplies
  static constexpr int kWords = 1;  // of a thread, in one step
  static constexpr int kScales = 4096, kGroups = 1;
  static constexpr int kOfStage = kTileK / kDepth;  // along k
  static constexpr int kStageBytes = 2 * kBytes;

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
  int m, n, batch, end;
};

__device__ __forceinline__ int k_tiles(const Parameters& p) { return (p.k + kTileK - 1) / kTileK; }

// What a cluster computes at a time: the k tiles from `begin` to `end` of one tile.
struct Unit {
  int tile, begin, end;
};

// Blocks take whole tiles, in turn.
struct Walk {
  int tile, tiles, clusters, k_tiles;

  __device__ __forceinline__ Walk(const Parameters&, int tiles, int k_tiles, int cluster, int clusters)
      : tile(cluster), tiles(tiles), clusters(clusters), k_tiles(k_tiles) {}

  __device__ __forceinline__ bool next(Unit& unit) {
    unit = {tile, 0, k_tiles};
    tile += clusters;
    return unit.tile < tiles;
  }
};

// Where each group of rows ends, and how many tiles come before that. Shared memory has it for a whole launch.
struct GroupTable {
  static constexpr int kMost = 1024, kRowsOfTile = kTileM * kClusterM;
  int ends[kMost + 1], tiles[kMost + 1];  // of group g at g + 1; tiles along m, counted in clusters

  // All threads copy the offsets, then one warp adds up. An offset below the one before it counts as that, and
  // one past the last row as the last row: no tile has a row outside of D.
  __device__ __forceinline__ void fill(const Parameters& p) {
    for (int group = threadIdx.x; group < p.batches; group += blockDim.x)
      ends[group + 1] = max(0, min(p.offsets[group], p.m));
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // A lane has some groups in a row. Where they begin, and what it adds to, the lanes before it say.
    const int lane = threadIdx.x, each = (p.batches + 31) / 32;
    const int first = min(lane * each, p.batches), last = min(first + each, p.batches);
    int largest = 0;
    for (int group = first; group < last; ++group) largest = max(largest, ends[group + 1]);
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, largest, apart);
      if (lane >= apart) largest = max(largest, other);
    }
    int start = __shfl_up_sync(~0u, largest, 1);
    if (lane == 0) start = 0;
    int count = 0;
    for (int group = first, begin = start; group < last; ++group) {
      const int end = max(begin, ends[group + 1]);
      count += tiles_of(end - begin);
      begin = end;
    }
    const int own = count;
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, count, apart);
      if (lane >= apart) count += other;
    }
    count -= own;
    for (int group = first; group < last; ++group) {
      const int end = max(start, ends[group + 1]);
      count += tiles_of(end - start);
      ends[group + 1] = start = end;
      tiles[group + 1] = count;
    }
    if (lane == 0) ends[0] = tiles[0] = 0;
  }

  __device__ __forceinline__ static int tiles_of(int rows) { return (rows + kRowsOfTile - 1) / kRowsOfTile; }
};

// The tiles of all groups, one group after the other: in a group bands of kGroup tiles along_m, so that
// the operands of tiles in flight stay in L2. Groups without rows have no tile.
struct GroupedTiles {
  const GroupTable& table;
  const int groups, columns;  // of tiles, in clusters

  __device__ __forceinline__ GroupedTiles(const Parameters& p, const GroupTable& table)
      : table(table), groups(p.batches), columns((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN)) {}

  __device__ __forceinline__ int count() const { return table.tiles[groups] * columns; }

  // Where this block's tile starts, whose group it is of, and where the group ends.
  __device__ __forceinline__ Place at(int index, int rank) const {
    const int row = index / columns;
    int group = 0, past = groups;  // the last group that begins at this row of tiles or before it
    while (past - group > 1) {
      const int middle = (group + past) / 2;
      if (table.tiles[middle] <= row) group = middle;
      else past = middle;
    }
    const int before = table.tiles[group], rows = table.tiles[group + 1] - before;
    index -= before * columns;
    const int band = index / (kGroup * columns);
    const int height = min(rows - band * kGroup, kGroup);
    const int offset = index - band * kGroup * columns;
    const int i = band * kGroup + offset % height, j = offset / height;
    return {table.ends[group] + (i * kClusterM + rank % kClusterM) * kTileM,
            (j * kClusterN + rank / kClusterM) * kTileN, group, table.ends[group + 1]};
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
        if (place.row[i] >= at.end) continue;
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
  GroupTable groups;
  FullBarrier full[kStages];    // the bytes of both producers have arrived
  EmptyBarrier empty[kStages];  // every warp that reads the stage is done with it
};
static_assert(sizeof(SharedStorage) <= 230400);

// What comes before this may run under the kernel before, and the next kernel's under this one.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Producer: two threads keep the ring of stages full ------------------------------------------
// What a block loads: the k tiles of one unit after the other.
struct Loads {
  const GroupedTiles tiles;
  Walk walk;
  Unit unit{0, 0, 0};
  Place at;    // of the unit in D
  int k_tile;  // the one to load

  __device__ __forceinline__ Loads(const Parameters& p, const SharedStorage& shared, int cluster, int clusters)
      : tiles(p, shared.groups), walk(p, tiles.count(), k_tiles(p), cluster, clusters), at{} {}

  __device__ __forceinline__ bool next() {
    if (unit.begin >= unit.end) {
      if (!walk.next(unit)) return false;
      at = tiles.at(unit.tile, 0);
    }
    k_tile = unit.begin++;
    return true;
  }
};

// Loads slabs of the groups' matrices. What lies past the last block of rows is not stored, and past the end of k
// A is zero: there any slab will do.
__device__ __forceinline__ void load_slabs(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  const int64_t pitch = int64_t(p.slabs) * Slab::kBytes;  // of blocks of rows
  CUTE_NO_UNROLL
  for (Loads loads(p, shared, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    const int first = loads.k_tile * Slab::kOfStage;
    const int there = min(p.slabs - first, Slab::kOfStage);
    const int row_block = loads.at.n / kWgmmaM, last = p.row_blocks - 1 - row_block;
    const uint8_t* from = p.b + (int64_t(loads.at.batch) * p.row_blocks + row_block) * pitch + first * Slab::kBytes;
    uint8_t* to = shared.b[position.stage];
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx(Slab::kStageBytes);
    CUTE_UNROLL
    for (int i = 0; i < kRows / kWgmmaM; ++i) {
      Slab::load(full, to, from, there * Slab::kBytes);
      to += Slab::kOfStage * Slab::kBytes;
      if (i < last) from += pitch;
    }
  }
}

// Loads A. Rows of a tile past the end of its group are of the next one, and are multiplied for nothing.
__device__ __forceinline__ void load_a(const Parameters& p, SharedStorage& shared, int cluster, int clusters) {
  Position position{0, 1};
  CUTE_NO_UNROLL
  for (Loads loads(p, shared, cluster, clusters); loads.next(); position.advance()) {
    FullBarrier& full = shared.full[position.stage];
    shared.empty[position.stage].wait(position.phase);
    full.arrive_and_expect_tx(kPanels * OperandA::kBytes);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel)
      OperandA::load(p.a_map, full, shared.a[position.stage] + panel * OperandA::kBytes, loads.at.m,
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
__device__ __forceinline__ uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Four bytes of b:a (0..3 are a's) by the nibbles of `choice`; 8 more is that byte's sign, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t choice) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(choice));
  return d;
}

// uint4 by bf16: exact (q - z) / kUnit. As int4_bf16.cuh, with the row's zero point for the 8.
struct Decode {
  static constexpr int kWords = 1;
  static constexpr float kUnit = 64;
  uint32_t offset[2];

  __device__ __forceinline__ Decode(uint32_t, uint32_t zeros) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row)  // the byte in both halves is z 2^-133
      offset[row] = multiply_bf16(permute(zeros, 0, row ? 0x4141 : 0x4040), 0xff00ff00);  // -2^127
  }

  __device__ __forceinline__ void step(const uint32_t (&words)[kWords], uint32_t (&registers)[4]) const {
    const uint32_t up = words[0] >> 8;
    registers[0] = fma_bf16(words[0] & 0x000f000f, 0x7f007f00, offset[0]);
    registers[1] = fma_bf16(words[0] & 0x00f000f0, 0x7d007d00, offset[1]);
    registers[2] = fma_bf16(up & 0x000f000f, 0x7f007f00, offset[0]);
    registers[3] = fma_bf16(up & 0x00f000f0, 0x7d007d00, offset[1]);
  }
};

// What a thread has of a group: the scales of its rows r and r + 8, and their zero points, a byte each.
struct Group {
  float2 scales;
  uint32_t zeros;

  // Of a block of 64 rows of W, which has all of them; past the last one nothing is stored.
  __device__ __forceinline__ void read(const Parameters& p, int row_block, int batch) {
    const int row = (batch * p.row_blocks + min(row_block, p.row_blocks - 1)) * kWgmmaM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    scales = {float(p.channel_scales[row]), float(p.channel_scales[row + 8])};
    zeros = p.channel_zeros[row] | p.channel_zeros[row + 8] << 8;
  }

  __device__ __forceinline__ float low() const { return scales.x; }
  __device__ __forceinline__ float high() const { return scales.y; }

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

// Takes the sums of all k, times the scales.
__device__ __forceinline__ void promote(Sums& sums, const Sums& part, const Group (&group)[kBlocks]) {
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    const float low = group[block].low() * Decode::kUnit, high = group[block].high() * Decode::kUnit;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) sums[block][i] = (i % 4 < 2 ? low : high) * part[block][i];
  }
}

// D[64 x 64] += A[64 x 16] * B[16 x 64]; A in registers, B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(const uint32_t (&a)[4], uint64_t b, float (&d)[32], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

// The sums of one unit's products, by wgmma: weights are decoded into registers while the tensor core
// multiplies what was decoded before.
struct Products {
  static constexpr int kIssued = 4;  // steps that are issued together, of each block of rows
  static constexpr int kIssues = Slab::kSteps / kIssued;  // of a slab
  Sums sums;
  Group group[kBlocks];  // of all k
  uint64_t panels;  // of the first stage, as wgmma is told of them

  __device__ __forceinline__ explicit Products(const uint8_t* a)
      : panels(matrix(a, 0, 1024, 1)) {}

  // Keeps the compiler from moving sums across asynchronous products.
  __device__ __forceinline__ static void fence(Sums& held) {
    CUTE_UNROLL
    for (int i = 0; i < kBlocks * kCount; ++i) asm volatile("" : "+f"(held[i / kCount][i % kCount])::"memory");
  }

  // Issues the products of a slab of each block of rows; the last are under way when it returns. `own`: its
  // number among the consumer's of the stage. The stage before, if one is held, is done with meanwhile.
  __device__ __forceinline__ void add(uint64_t a, uint32_t slabs, int own, EmptyBarrier& previous, bool held) {
    Codes codes[kBlocks];
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTE_UNROLL
      for (int piece = 0; piece < Slab::kPieces; ++piece)
        codes[block].read(slabs + block * Slab::kOfStage * Slab::kBytes, piece);
    }
    CUTE_UNROLL
    for (int issue = 0; issue < kIssues; ++issue) {
      uint32_t registers[kBlocks][kIssued][4];
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks; ++i) {
        const int block = i % kBlocks, step = issue * kIssued + i / kBlocks;
        group[block].decode().step(codes[block].words[step], registers[block][i / kBlocks]);
      }
      CUTE_UNROLL
      for (int i = 0; i < kIssued * kBlocks * 4; ++i)  // complete before the products begin
        asm volatile("" : "+r"(registers[i % kBlocks][i / kBlocks / 4][i / kBlocks % 4])::"memory");
      Sums& into = sums;
      fence(into);
      cute::warpgroup_arrive();
      CUTE_UNROLL
      for (int i = 0; i < kIssued; ++i) {
        const int step = issue * kIssued + i;
        const uint64_t at = a + step / kOfPanel * (OperandA::kBytes / 16) + step % kOfPanel * OperandA::kStep;
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block)
          Wgmma::fma(registers[block][i], at, into[block], true);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // what was issued before is done: its registers may be overwritten
      if (issue == 0 && own == 0) release(previous, held);
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
      previous = position.stage;
      position.advance();
    } while (++i < count);
    cute::warpgroup_wait<0>();
    fence(sums);
    release(shared.empty[previous]);
    promote(sums, sums, group);
  }
};

// ---- Consumer: products of its rows of the tile and its share of k, then their epilogue and store ---------
__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank, int cluster,
                                        int clusters) {
  const GroupedTiles tiles(p, shared.groups);
  const int rows = consumer / kShares, share = consumer % kShares;
  Position position{0, 0};
  Products products(shared.a[0]);
  Store store(nullptr, consumer);
  Epilogue::Block block[kBlocks];
  Epilogue::Operands operands[kFragments];
  Walk walk(p, tiles.count(), k_tiles(p), cluster, clusters);
  for (Unit unit; walk.next(unit);) {
    Place at = tiles.at(unit.tile, 0);
    at.n += rows * kBlocks * kWgmmaM;
    Epilogue epilogue(p);
    CUTE_UNROLL
    for (int i = 0; i < kBlocks; ++i) products.group[i].read(p, at.n / kWgmmaM + i, at.batch);
    products.run(shared, position, unit.end - unit.begin, rows, share);
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
    mixed_gemm_sm90a_bf16_uint4_bf16_g0_bf16_groups_rows_64x128x128_wgmma_sums_stages9_along_m_636aa944(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that it is uniform
  const int rank = 0;
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == kWarps * 32) {
    cute::prefetch_tma_descriptor(&p.a_map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(2);  // who loads slabs, and who loads A
      shared.empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  wait_for_launch_before();  // which may have written the offsets
  shared.groups.fill(p);
  __syncthreads();
  if (warp >= kWarps) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    produce(p, shared, cluster, clusters);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warp / 4, rank, cluster, clusters);
  }
}
