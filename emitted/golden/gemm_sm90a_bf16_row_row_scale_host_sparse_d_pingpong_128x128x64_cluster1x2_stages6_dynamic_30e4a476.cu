// gemm_sm90a_bf16_row_row_scale_host_sparse_d_pingpong_128x128x64_cluster1x2_stages6_dynamic_30e4a476
//
// D[m, n] = epilogue(A[m, k] B[k, n]): scale_host
//   A bf16 row, B bf16 row, accumulated in fp32, D bf16 row
//   blocks of 128x128 of D count where a mask says so, the others are zeros
//   tile 128x128x64, cluster 1x2, 2 consumers, 6 stages, along_m, swizzle 8, store tma
//   clusters take tiles from a counter, those with the longest lists first
// Digest 30e4a4769c0b5a617807add8d72bc274263bfa93d357b158cbb0769c841d2be7; `warploom show` prints this file.
//
// Warpgroup 0, the producer: thread 0 issues the TMA loads; warp 1 stores zeros.
// Warpgroups 1 and 2, the consumers: wgmma on 128 rows of a tile each (ping-pong), then the epilogue.
// Registers per thread: 168 at launch; setmaxnreg: producer 40, consumers 232 (40 + 2 * 232 = 3 * 168)
//   A consumer thread has 128 accumulators.
//   Its epilogue takes 64 columns at a time, to save registers.
// Shared memory: 230688 bytes; the launch asks for 231424 of 232448
//   a, b         6 stages * (16384 + 16384) = 196608
//   staging      2 consumers * 2 buffers * 8192 = 32768
//   zeros        8 rows * 128 = 1024
//   tiles        6 stages * 16 = 96
//   mails        6 stages * 16 = 96
//   full, empty  6 stages * 2 * 8 = 96
// Barriers    waited for by    guards                        a phase completes after
// full        consumers        a stage until it is filled    1 arrival and the stage's bytes
// empty       the producer     a stage while wgmma reads it  2 arrivals: 1 consumer of 2 CTAs
// arrived     other producers  a tile's number               1 arrival and the mail's bytes
// named 1, 2  all that arrive  its staging buffers           128 threads of a consumer
// named 3, 4  one consumer     one main loop at a time       128 threads of each consumer
// cluster     all that arrive  barriers, at start and exit   all threads of 2 CTAs
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
constexpr int kTileM = 128, kTileN = 128, kTileK = 64;
constexpr int kClusterM = 1, kClusterN = 2, kClusterSize = kClusterM * kClusterN;
constexpr int kConsumers = 2;  // consumer warpgroups
constexpr int kSharing = 1;    // consumers that share a tile: each has some of its rows
constexpr int kStages = 6;
constexpr int kSwizzle = 8;  // rows of tiles in a band of the tile scheduler
constexpr int kRows = 128, kColumns = 128;  // of a tile, as wgmma sees it
constexpr int kWgmmaM = 64, kBlocks = kRows / (kWgmmaM * kSharing);  // blocks of 64 rows in a consumer
constexpr int kCount = kColumns / 2;  // accumulators of a thread in one block of 64 rows
constexpr int kChunkColumns = 64;  // columns of a block in one pass of the epilogue
constexpr int kChunks = kColumns / kChunkColumns;
constexpr int kFragments = kChunkColumns / 8;  // 2 x 2 fragments of a thread in one chunk
constexpr auto kEvictNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// The host packs these bytes; the assertions hold its offsets and the compiler's together.
struct alignas(128) Parameters {
  cute::TmaDescriptor a_map;  // A, in operand boxes
  cute::TmaDescriptor a_tail_map;  // A, in boxes of the tail
  cute::TmaDescriptor b_map;  // B, in operand boxes
  cute::TmaDescriptor zeros_map;  // D, in boxes of zeros
  cute::TmaDescriptor d_map;  // D, in staging boxes
  const uint8_t* mask;  // not 0 for each block of 128x128 that counts
  int* tiles;  // blocks of D, those of zeros as -1 - number
  int* counter;  // tiles that clusters have taken; blocks of D that count
  int64_t mask_row;  // elements of it between blocks along m
  int64_t mask_column;  // elements of it between blocks along n
  int32_t a_tail_rows;  // of A in the last tile along m, in eights
  int32_t m;  // rows of D
  int32_t n;  // columns of D
  int32_t k;  // columns of A, rows of B
  float scale_0;  // scale
};
static_assert(sizeof(Parameters) == 768);
static_assert(OFFSET(Parameters, a_map) == 0 && OFFSET(Parameters, a_tail_map) == 128);
static_assert(OFFSET(Parameters, b_map) == 256 && OFFSET(Parameters, zeros_map) == 384);
static_assert(OFFSET(Parameters, d_map) == 512 && OFFSET(Parameters, mask) == 640);
static_assert(OFFSET(Parameters, tiles) == 648 && OFFSET(Parameters, counter) == 656);
static_assert(OFFSET(Parameters, mask_row) == 664 && OFFSET(Parameters, mask_column) == 672);
static_assert(OFFSET(Parameters, a_tail_rows) == 680 && OFFSET(Parameters, m) == 684);
static_assert(OFFSET(Parameters, n) == 688 && OFFSET(Parameters, k) == 692);
static_assert(OFFSET(Parameters, scale_0) == 696);

// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Device functions ----------------------------------------------------------------------------------
// D[64 x 128] += A[64 x 16] * B[16 x 128]; A and B by descriptor, D in registers.
struct Wgmma {
  static constexpr int kK = 16;

  __device__ __forceinline__ static void fma(uint64_t a, uint64_t b, float (&d)[64], bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 0, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(int(add)));
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

// A is K-major: a row of 128 bytes has the k tile of one m.
struct OperandA {
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kRowBytes = 128;  // of the tile
  static constexpr int kStep = 32 / 16;  // in a descriptor, from one wgmma's k to the next
  static constexpr uint16_t kReceivers = (1 << kClusterSize) - 1;

  // Multicasts the tile's rows from `first` on, as many as the map's box has, to these CTAs.
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int m, int k, int first, uint16_t receivers) {
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, reinterpret_cast<uint64_t*>(&full),
        receivers, kEvictNormally, tile + first * kRowBytes,
        k, m + first);
  }
};

// B is n-major: boxes of 64 n side by side, a row of 128 bytes per k.
struct OperandB {
  static constexpr int kBytes = 16384;  // of one stage
  static constexpr int kStep = 2048 / 16;  // in a descriptor, from one wgmma's k to the next
  static constexpr int kBoxes = 2, kBoxColumns = 64;
  static constexpr int kBoxBytes = 8192;

  // Starts the load of the tile at (n, k).
  __device__ __forceinline__ static void load(const cute::TmaDescriptor& map, FullBarrier& full, uint8_t* tile,
                                              int n, int k) {
    CUTE_NO_UNROLL  // the producer has few registers
    for (int box = 0; box < kBoxes; ++box)
      cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kEvictNormally,
          tile + box * kBoxBytes, n + box * kBoxColumns, k);
  }
};

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

// Ping-pong: one consumer runs its main loop while the other runs its epilogue (CUTLASS:
// OrderedSequenceBarrier). A phase parity tells one lap of the stages from the next but not from the one after,
// so a consumer waits for its own stages only once the other has waited for all of its. Consumer 0 starts its
// main loop after named barrier 3, consumer 1 after 4.
struct OrderedBarrier {
  int consumer;

  // `k_tiles` are those of the first tile, which consumer 0 has.
  __device__ __forceinline__ OrderedBarrier(int consumer, int k_tiles, Position& position)
      : consumer(consumer) {
    if (consumer == 1) pass(position, k_tiles);  // consumer 0 starts
  }

  __device__ __forceinline__ void begin() const { cutlass::arch::NamedBarrier::sync(256, 3 + consumer); }

  // Lets the other consumer start its main loop, and skips the stages of its tile.
  __device__ __forceinline__ void pass(Position& position, int k_tiles) const {
    cutlass::arch::NamedBarrier::arrive(256, 4 - consumer);
    position.stage += k_tiles;
    position.phase ^= position.stage / kStages % 2;
    position.stage %= kStages;
  }

  // The last pass let a consumer start that has no tile: its arrival must not stay pending.
  __device__ __forceinline__ void finish(int tiles) const {
    if (tiles % 2 == consumer) begin();
  }
};

// A tile of D.
struct TileCoord {
  int m, n;  // the row and the column of its first element
  int first_k_tile;
  bool shares_a;  // whether all tiles of the cluster are of one row of blocks
  int k_tiles;
};

constexpr int kBlock = 128;  // rows and columns of a block of the sparse matrix

// The tiles of D in the order of a list: those that are computed, then those that are zeros. Of these one
// k tile is multiplied that lies past the end of k, where TMA loads zeros. The tiles of a cluster are alike:
// between both kinds, and at the end, are some that lie past the last row.
struct ListedTiles {
  const int* const tiles;
  const int rows, columns, all_k_tiles;

  __device__ __forceinline__ explicit ListedTiles(const Parameters& p)
      : tiles(p.tiles),
        rows((p.m + kBlock - 1) / kBlock),
        columns((p.n + kTileN - 1) / kTileN),
        all_k_tiles((p.k + kTileK - 1) / kTileK) {}

  // How many tiles of clusters there are, whatever the mask is.
  __device__ __forceinline__ int count() const {
    return (rows * columns + 2 * kClusterSize - 2) / kClusterSize;
  }

  // A tile, whose k tiles KTiles has.
  __device__ __forceinline__ TileCoord at(int index, int rank) const {
    const int* const list = tiles + index * kClusterSize;
    const int entry = list[rank];
    const bool computed = entry >= 0;
    const int block = computed ? entry : ~entry, row = block / columns;
    const int first = computed ? 0 : all_k_tiles, k_tiles = computed ? all_k_tiles : 1;
    const bool shares_a = computed && list[0] / columns == list[1] / columns;
    return {row * kBlock, (block - row * columns) * kTileN, first, shares_a, k_tiles};
  }
};

// The k tiles of a tile, for the producer.
struct KTiles {
  const int first;

  __device__ __forceinline__ KTiles(const Parameters&, const TileCoord& at) : first(at.first_k_tile) {}

  __device__ __forceinline__ int next(int k_tile, int) const { return first + k_tile; }
};

// The tiles of a list that are computed: clusters take no others.
struct ComputedTiles : ListedTiles {
  const int blocks;

  __device__ __forceinline__ explicit ComputedTiles(const Parameters& p)
      : ListedTiles(p), blocks(p.counter[1]) {}

  __device__ __forceinline__ int count() const { return (blocks + kClusterSize - 1) / kClusterSize; }
};

// ---- Zeros: one warp stores the blocks of D that do not count ----------------------------------------
// By TMA, from a box in shared memory: consumers have no part in it. It pauses between blocks, so that they are
// stored in about half of the time that MMAs take: all at once, they would keep operands waiting in L2.
__device__ __forceinline__ void store_zeros(const Parameters& p, uint8_t* box) {
  constexpr int kBoxColumns = 64, kBoxRows = 8;
  constexpr float kHalfKTile = 200, kLongest = 10000;  // ns
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < 1024 / 16; i += 32) reinterpret_cast<uint4*>(box)[i] = {};
  cute::tma_store_fence();  // orders these writes before TMA's reads, across the warp
  __syncwarp();
  if (lane > 0) return;
  const ComputedTiles tiles(p);
  const int zeros = tiles.rows * tiles.columns - tiles.blocks;
  const float k_tiles = float(tiles.all_k_tiles) * tiles.blocks / max(zeros, 1);  // for each block of zeros
  const int* const last = tiles.tiles + tiles.ListedTiles::count() * kClusterSize - 1;  // zeros begin there
  for (int zero = blockIdx.x; zero < zeros; zero += gridDim.x) {
    const int block = ~last[-zero], row = block / tiles.columns, column = block - row * tiles.columns;
    CUTE_NO_UNROLL
    for (int i = 0; i < kBlock; i += kBoxRows)
      for (int j = 0; j < kTileN; j += kBoxColumns)
        cute::SM90_TMA_STORE_2D::copy(&p.zeros_map, box, column * kTileN + j, row * kBlock + i);
    cute::tma_store_arrive();
    __nanosleep(uint32_t(min(kHalfKTile * k_tiles, kLongest)));
  }
  cute::tma_store_wait<0>();  // the CTA must not exit while TMA reads the box
}

// The dynamic tile scheduler: each cluster takes its next tile from a counter in global memory, one tile ahead,
// which hides the latency of the atomic. The first launch sets the counter to 0.
//
// The producer of rank 0 takes tiles for its cluster. It mails each to the other producers, in a slot of the
// tile's first stage, once consumers have released that: since then all producers have read its last mail.
struct Mail {
  FullBarrier arrived;
  uint32_t phase;  // of the next mail, for the producer that reads it
  volatile int tile;

  __device__ __forceinline__ void init() {
    arrived.init(1);
    phase = 0;
  }

  __device__ __forceinline__ void send(int tile) {
    for (int rank = 1; rank < kClusterSize; ++rank)
      cute::store_shared_remote(tile, cute::cast_smem_ptr_to_uint(const_cast<int*>(&this->tile)),
                                cute::cast_smem_ptr_to_uint(&arrived), rank);
  }

  __device__ __forceinline__ int receive() {
    arrived.arrive_and_expect_tx(sizeof(tile));
    arrived.wait(phase);
    phase ^= 1;
    return tile;
  }
};

struct TileCounter {
  int* const counter;
  const int clusters;
  int taken = 0;

  __device__ __forceinline__ TileCounter(const Parameters& p, int clusters)
      : counter(p.counter), clusters(clusters) {}

  // Takes the tile that follows this one. Each cluster begins with the tile of its own number.
  __device__ __forceinline__ void take() { taken = clusters + atomicAdd(counter, 1); }
};

// What consumers need of a tile, in a slot of its first stage. It is written before the producer arrives at the
// stage's full barrier, and read behind a wait for that: volatile, as asm keeps no other accesses in place.
struct alignas(16) TileSlot {
  volatile int m, n, k_tiles;  // no k tiles: there are no more tiles

  __device__ __forceinline__ void write(const TileCoord& at) {
    m = at.m;
    n = at.n;
    k_tiles = at.k_tiles;
  }

  __device__ __forceinline__ TileCoord read() const {
    TileCoord at{};
    at.m = m;
    at.n = n;
    at.k_tiles = k_tiles;
    return at;
  }
};

// Multiplies by a scalar that the host passed.
struct ScaleHost {
  float scale;

  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] *= scale;
  }
};

// The steps from accumulators to D, in order.
struct Epilogue {
  ScaleHost step_0;

  __device__ __forceinline__ explicit Epilogue(const Parameters& p)
      : step_0{p.scale_0} {}

  __device__ __forceinline__ void apply(Value (&x)[2][2]) {
    step_0.apply(x);
  }
};

// Two adjacent elements of a row of D.
struct alignas(2 * sizeof(ElementD)) Pair {
  ElementD value[2];
};

// Converts two adjacent values of a row to D's type, rounded to nearest even.
__device__ __forceinline__ Pair converted(const Value (&x)[2]) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x[1]), "f"(x[0]));
  return reinterpret_cast<const Pair&>(bits);
}

// Stores D by TMA from two staging buffers per consumer: one is filled while TMA reads the other.
struct Store {
  static constexpr int kSpan = 128;  // bytes of a staging row
  static constexpr int kBytes = 64 * kSpan;
  uint8_t* buffers;
  int barrier, thread;  // this consumer's named barrier; the thread's index in its warpgroup
  int first = 0;        // the buffer of the tile's first chunk

  __device__ __forceinline__ Store(uint8_t* staging, int consumer)
      : buffers(staging + consumer * 2 * kBytes), barrier(1 + consumer), thread(threadIdx.x % 128) {}

  // TMA's swizzle: the index of a 16-byte chunk in its row is XORed with bits of the row's index.
  __device__ __forceinline__ static int swizzled(int row, int byte) {
    const int offset = row * kSpan + byte;
    return offset ^ ((offset >> 3) & (kSpan - 16));
  }

  // Stores a chunk; the consumer's part of the tile starts at `at`.
  __device__ __forceinline__ void operator()(const Parameters& p, Value (&x)[kFragments][2][2],
                                             const TileCoord& at, int chunk) {
    uint8_t* buffer = buffers + (first ^ chunk % 2) * kBytes;
    if (chunk + 1 == kBlocks * kChunks) first ^= kBlocks * kChunks % 2;  // buffers alternate across tiles
    if (thread == 0) cute::tma_store_wait<1>();  // every store but the latest has read its buffer
    cutlass::arch::NamedBarrier::sync(128, barrier);
    stage(buffer, x);
    cute::tma_store_fence();  // orders these generic-proxy writes before the TMA store, across the barrier
    cutlass::arch::NamedBarrier::sync(128, barrier);
    if (thread == 0) {
      const int column = at.n + chunk % kChunks * kChunkColumns, row = at.m + chunk / kChunks * kWgmmaM;
      cute::SM90_TMA_STORE_2D::copy(&p.d_map, buffer, column, row);
      cute::tma_store_arrive();
    }
  }

  // stmatrix writes 16 x 16 elements of 16 bits; lanes 0-15 address the left 8 columns, 16-31 the right.
  __device__ __forceinline__ void stage(uint8_t* buffer, Value (&x)[kFragments][2][2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    CUTE_UNROLL
    for (int f = 0; f < kFragments; f += 2) {
      const uint32_t address = cute::cast_smem_ptr_to_uint(buffer) + swizzled(row, f * 16 + lane / 16 * 16);
      const Pair pairs[4] = {converted(x[f][0]), converted(x[f][1]), converted(x[f + 1][0]),
                             converted(x[f + 1][1])};
      const auto& words = reinterpret_cast<const uint32_t(&)[4]>(pairs);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(address),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
    }
  }

  // The CTA must not exit while TMA still reads its shared memory.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][OperandA::kBytes];  // 1024: the period of a 128-byte swizzle
  alignas(1024) uint8_t b[kStages][OperandB::kBytes];
  alignas(1024) uint8_t staging[32768];
  alignas(128) uint8_t zeros[1024];  // a box of D
  TileSlot tiles[kStages];  // that begin with the stage
  Mail mails[kStages];  // of the number of the tile that begins with the stage
  FullBarrier full[kStages];    // all bytes of the stage have arrived
  EmptyBarrier empty[kStages];  // every consumer has read the stage
};
static_assert(sizeof(SharedStorage) <= 231424);

// ---- Producer: one thread keeps the stages of the pipeline full ------------------------------------
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared, int rank,
                                        int cluster, int clusters) {
  const ComputedTiles tiles(p);
  Position position{0, 1};  // the first waits pass: a new barrier is past phase parity 1
  TileCounter counter(p, clusters);
  int tile = cluster;
  while (tile < tiles.count()) {
    if (rank == 0) counter.take();
    const TileCoord at = tiles.at(tile, rank);
    const bool tail = p.m - at.m < kTileM;  // its box has no rows past the last
    const cute::TmaDescriptor& a_map = tail ? p.a_tail_map : p.a_map;
    const int a_rows = tail ? p.a_tail_rows : kTileM;
    // Where the cluster's tiles are of several rows, each CTA loads all slices of A, for itself.
    const int a_slice = a_rows / kClusterN, a_begin = at.shares_a ? rank * a_slice : 0;
    const int a_end = at.shares_a ? a_begin + a_slice : a_rows;
    const uint16_t a_receivers = at.shares_a ? OperandA::kReceivers : 1 << rank;
    KTiles k_tiles(p, at);
    for (int k_tile = 0; k_tile < at.k_tiles; ++k_tile) {
      const int listed = k_tiles.next(k_tile, at.k_tiles);
      FullBarrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase);
      if (k_tile == 0) shared.tiles[position.stage].write(at);
      // Before any copy: the phase cannot complete without all bytes, those that peers multicast too.
      full.arrive_and_expect_tx(a_rows * (OperandA::kBytes / kTileM) + OperandB::kBytes);
      CUTE_NO_UNROLL
      for (int a_first = a_begin; a_first < a_end; a_first += a_slice)
        OperandA::load(a_map, full, shared.a[position.stage], at.m, listed * kTileK, a_first, a_receivers);
      OperandB::load(p.b_map, full, shared.b[position.stage], at.n, listed * kTileK);
      position.advance();
    }
    if (rank == 0) {
      shared.empty[position.stage].wait(position.phase);
      shared.mails[position.stage].send(counter.taken);
      tile = counter.taken;
    } else {
      tile = shared.mails[position.stage].receive();
    }
  }
  shared.empty[position.stage].wait(position.phase);
  shared.tiles[position.stage].k_tiles = 0;  // ends the consumers' loops
  shared.full[position.stage].arrive();
}

// ---- Consumer: main loop over k, then the epilogue ------------------------------------------------
using RowOperand = OperandA; using ColumnOperand = OperandB;
// What to add to a descriptor for the next stage, and for the next 64 rows.
constexpr int kStageRows = RowOperand::kBytes / 16, kStageColumns = ColumnOperand::kBytes / 16;
constexpr int kBlockRows = kStageRows * kWgmmaM / kRows;

// A compiler fence: accesses to these accumulators do not move across it (cute::warpgroup_fence_operand).
__device__ __forceinline__ void fence(Accumulator (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// Arrives at the empty barrier of a stage in every CTA of the cluster: each of them multicasts into this
// CTA's stage, and must not do so before this consumer has read it. One lane arrives for each CTA.
__device__ __forceinline__ void release(EmptyBarrier& empty) {
  const uint32_t cta = threadIdx.x % 128;
  empty.arrive(cta, cta < kClusterSize);
}

// The main loop's MMAs of one tile; the tensor core accumulates over all of k.
struct Mainloop {
  Accumulator accumulators[kBlocks][kCount];

  // Issues the MMAs of one stage, and does not wait for them.
  __device__ __forceinline__ void issue(uint64_t rows, uint64_t columns, bool add) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(accumulators[block]);
    cute::warpgroup_arrive();
    CUTE_UNROLL
    for (int step = 0; step < kTileK / Wgmma::kK; ++step) {
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        Wgmma::fma(rows + block * kBlockRows + step * RowOperand::kStep, columns + step * ColumnOperand::kStep,
                   accumulators[block], add || step > 0);
    }
    cute::warpgroup_commit_batch();
  }

  // Issues the MMAs of the next stage, and releases the stage before once its own are done.
  __device__ __forceinline__ void next(uint64_t rows, uint64_t columns, EmptyBarrier& previous) {
    issue(rows, columns, true);
    cute::warpgroup_wait<1>();  // all but the batch just committed: the previous stage is read
    release(previous);
  }

  __device__ __forceinline__ void finish(EmptyBarrier& previous) {
    cute::warpgroup_wait<0>();
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) fence(accumulators[block]);
    release(previous);
  }
};

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer, int rank,
                                        int cluster, int clusters) {
  shared.full[0].wait(0);
  const int k_tiles = shared.tiles[0].k_tiles;  // of the first tile
  const int part = consumer % kSharing;  // which rows of a tile it has
  const uint64_t rows = matrix(shared.a[0], 0, 1024, 1) + part * kBlocks * kBlockRows;
  const uint64_t columns = matrix(shared.b[0], 8192, 1024, 1);
  Position position{0, 0};
  const OrderedBarrier order(consumer, k_tiles, position);
  Store store(shared.staging, consumer);
  Epilogue epilogue(p);
  int skipped = consumer == 0 ? 1 : k_tiles;  // k tiles of the other consumer's last tile; 0: there was none
  while (skipped > 0) {
    order.begin();
    shared.full[position.stage].wait(position.phase);
    TileCoord at = shared.tiles[position.stage].read();
    if (at.k_tiles == 0) break;
    at.m += part * kBlocks * kWgmmaM;
    Mainloop mainloop;
    int previous = position.stage;  // the stage that wgmma may still read
    shared.full[position.stage].wait(position.phase);
    mainloop.issue(rows + position.stage * kStageRows, columns + position.stage * kStageColumns, false);
    position.advance();
    CUTE_NO_UNROLL
    for (int k_tile = 1; k_tile < at.k_tiles; ++k_tile) {
      shared.full[position.stage].wait(position.phase);
      mainloop.next(rows + position.stage * kStageRows, columns + position.stage * kStageColumns,
                    shared.empty[previous]);
      previous = position.stage;
      position.advance();
    }
    shared.full[position.stage].wait(position.phase);  // of the other consumer's tile, or where there is none
    skipped = shared.tiles[position.stage].k_tiles;
    order.pass(position, skipped);
    mainloop.finish(shared.empty[previous]);
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      Value x[kFragments][2][2];
      CUTE_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int sum = (chunk % kChunks * kFragments + f) * 4 + i;
          x[f][i / 2][i % 2] = Value(mainloop.accumulators[chunk / kChunks][sum]);
        }
        epilogue.apply(x[f]);
      }
      store(p, x, at, chunk);
    }
  }
  store.finish();
}

extern "C" __global__ void __launch_bounds__((1 + kConsumers) * 128, 1)
    gemm_sm90a_bf16_row_row_scale_host_sparse_d_pingpong_128x128x64_cluster1x2_stages6_dynamic_30e4a476(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle makes it warp-uniform
  const int rank = cute::block_rank_in_cluster();
  const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.a_map, &p.a_tail_map, &p.b_map}) cute::prefetch_tma_descriptor(map);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(kSharing * kClusterSize);
    }
    for (auto& mail : shared.mails) mail.init();
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();  // no CTA arrives at barriers of another before they are initialized
  cute::cluster_wait();
  wait_for_previous_grid();  // before any access to global memory
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce(p, shared, rank, cluster, clusters);
    if (threadIdx.x / 32 == 1) store_zeros(p, shared.zeros);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(p, shared, warpgroup - 1, rank, cluster, clusters);
  }
  // No CTA exits while another still multicasts to it or arrives at its barriers.
  cute::cluster_arrive();
  cute::cluster_wait();
}

// ---- Lists: what the tiles take of the mask, in a launch of one block before that of the tiles ------------
extern "C" __global__ void __launch_bounds__(1024)
    gemm_sm90a_bf16_row_row_scale_host_sparse_d_pingpong_128x128x64_cluster1x2_stages6_dynamic_30e4a476_lists(const __grid_constant__ Parameters p) {
  constexpr int kThreads = 1024, kWarps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t lower = (1u << lane) - 1;  // the lanes before this one
  wait_for_previous_grid();
  if (threadIdx.x == 0) p.counter[0] = 0;  // tiles that clusters have taken
  const ListedTiles tiles(p);
  const int rows = tiles.rows, columns = tiles.columns, places = tiles.count() * kClusterSize;
  int* const counted = p.tiles + places;  // blocks of each row that count
  for (int row = warp; row < rows; row += kWarps) {
    int blocks = 0;
    for (int column = lane; column < columns; column += 32)
      blocks += p.mask[row * p.mask_row + column * p.mask_column] != 0;
    blocks = __reduce_add_sync(~0u, blocks);
    if (lane == 0) counted[row] = blocks;
  }
  __syncthreads();
  // Clusters take two blocks of one row, in bands of kSwizzle rows, by the column of the first of them. Blocks
  // that are left over follow, row by row; zeros are laid down from the end on.
  for (int row = warp; row < rows; row += kWarps) {
    const int band = row / kSwizzle * kSwizzle;
    int before = 0, whole = 0, left = 0, zeros = 0;  // clusters of bands before, all; blocks of rows before
    for (int other = lane; other < rows; other += 32) {
      const int clusters = counted[other] / kClusterSize;
      whole += clusters;
      if (other < band) before += clusters;
      if (other >= row) continue;
      left += counted[other] % kClusterSize;
      zeros += columns - counted[other];
    }
    before = __reduce_add_sync(~0u, before);
    left = __reduce_add_sync(~0u, left) + __reduce_add_sync(~0u, whole) * kClusterSize;
    zeros = __reduce_add_sync(~0u, zeros);
    int seen = 0;  // blocks of row band + lane that count
    int own_seen = 0, last = 0;  // those of this row, and the cluster of the last of them
    for (int first = 0; first < columns; first += 32) {
      const int column = first + lane, block = row * columns + column;
      int place = before, added = 0;
      uint32_t own = 0;
#pragma unroll 8  // loads of more would spill
      for (int i = 0; i < kSwizzle; ++i) {
        const int other = min(band + i, rows - 1);
        const bool counts = column < columns && p.mask[other * p.mask_row + column * p.mask_column] != 0;
        const uint32_t all = __ballot_sync(~0u, counts);
        const int ahead = __shfl_sync(~0u, seen, i) + __popc(all & (other < row ? lower | 1u << lane : lower));
        const int begun = min((ahead + kClusterSize - 1) / kClusterSize, counted[other] / kClusterSize);
        if (band + i < rows) place += begun;
        if (other == row) own = all;
        if (lane == i) added = __popc(all);
      }
      seen += added;
      const int index = own_seen + __popc(own & lower), rest = index % kClusterSize;
      own_seen += __popc(own);
      const int leader = __shfl_sync(~0u, place, max(31 - __clz(own & lower), 0));
      if (rest > 0) place = (own & lower) != 0 ? leader : last;  // that of the block before
      if (own != 0) last = __shfl_sync(~0u, place, 31 - __clz(own));
      if (index / kClusterSize == counted[row] / kClusterSize) place = left;
      else place = place * kClusterSize + rest;
      if (own >> lane & 1) p.tiles[place] = block;
      else if (column < columns) p.tiles[places - 1 - zeros - (column - index)] = ~block;
    }
    if (row == rows - 1 && lane == 0) p.counter[1] = left + counted[row] % kClusterSize;  // blocks that count
    const int end = left + counted[row] % kClusterSize, alone = end % kClusterSize;  // behind the last row: all
    if (row == rows - 1 && lane < places - rows * columns)
      p.tiles[end + lane] = lane < alone ? rows * columns : ~(rows * columns);
  }
}
