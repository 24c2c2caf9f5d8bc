// What a decode kernel needs of CUDA, made up: threads are fibers that take turns on one thread of the host, and what a
// warp does together waits for its 32. Copies of the Tensor Memory Accelerator end at some later time. A block whose
// threads all wait for each other fails with 3, a barrier that is misused with 4.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>
using std::max;
using std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define CUTE_UNROLL
#define CUTE_NO_UNROLL

struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };

// ---- Fibers --------------------------------------------------------------------------------------
struct Warp {
  int arrived = 0, turn = 0;
  uint32_t words[2][32][8];
};
struct Named { int arrived = 0, turn = 0; };
struct Fiber {
  jmp_buf state;  // where it goes on; contexts would ask the kernel for a mask of signals at every change
  std::unique_ptr<char[]> stack{new char[1 << 16]};
  bool started = false, done = false;
  const int* watched = nullptr;  // it waits while these bits have this value, and is not entered to see it
  int mask = 0, value = 0;
  int turn = 0;  // of the cluster's barrier, at which it came there
};
struct Block {  // of a cluster
  uint8_t* shared;
  std::vector<Warp> warps;
  Named named[16];
};
static jmp_buf scheduler;
static std::vector<std::unique_ptr<Fiber>> fibers;  // of all blocks of a cluster, one after the other
static std::vector<Block> blocks;
static Named of_cluster;
static int self, block_threads, first_block;  // whose turn it is
static std::function<void()> body;
static uint8_t* shared_memory;
static std::vector<Warp>& warps() { return blocks[self / block_threads].warps; }
static void enter(int fiber) {
  self = fiber;
  threadIdx.x = fiber % block_threads;
  blockIdx.x = first_block + fiber / block_threads;
  shared_memory = blocks[fiber / block_threads].shared;
}
static long events;  // whatever may end somebody's wait
static std::mt19937 random_bits(7);

static void pause() {
  const int own = self;
  if (!_setjmp(fibers[own]->state)) _longjmp(scheduler, 1);
  enter(own);
}
static void wait_while(const int& watched, int value, int mask = -1) {
  Fiber& own = *fibers[self];
  own.watched = &watched, own.value = value, own.mask = mask;
  while ((watched & mask) == value) pause();
  own.watched = nullptr;
}
static void entry() {
  body();
  fibers[self]->done = true;
  ++events;
  _longjmp(scheduler, 1);
}
static void resume(int fiber) {
  Fiber& it = *fibers[fiber];
  if (it.watched && (*it.watched & it.mask) == it.value) return;
  enter(fiber);
  if (_setjmp(scheduler)) return;
  if (it.started) _longjmp(it.state, 1);
  it.started = true;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = it.stack.get(), first.uc_stack.ss_size = 1 << 16, first.uc_link = nullptr;
  makecontext(&first, entry, 0);
  setcontext(&first);
}
static int failed;
static bool in_fiber;
static void fail(const char* what, int code) {
  std::printf("%s, block %d\n", what, blockIdx.x);
  std::fflush(stdout);
  failed = code;
  while (in_fiber) pause();
}

// What each lane of the warp has put down, when all have.
static const uint32_t (*together(const uint32_t* mine, int count))[8] {
  Warp& warp = warps()[threadIdx.x / 32];
  const int turn = warp.turn;
  uint32_t(*words)[8] = warp.words[turn % 2];
  std::memcpy(words[threadIdx.x % 32], mine, 4 * count);
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.turn, ++events;
  wait_while(warp.turn, turn);
  return words;
}
template <class T> static T shuffled(T value, int from) {
  uint32_t mine[8];
  std::memcpy(mine, &value, 4);
  const auto all = together(mine, 1);
  std::memcpy(&value, all[from & 31], 4);
  return value;
}
template <class T> static T __shfl_sync(unsigned, T value, int from) { return shuffled(value, from); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int by) { return shuffled(value, threadIdx.x % 32 ^ by); }
template <class T> static T __shfl_up_sync(unsigned, T value, int by) {
  return shuffled(value, max(threadIdx.x % 32 - by, 0));
}
static uint32_t __ballot_sync(unsigned, bool value) {
  const uint32_t mine[8] = {value};
  const auto all = together(mine, 1);
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= all[i][0] << i;
  return found;
}
static bool __any_sync(unsigned all, bool value) { return __ballot_sync(all, value) != 0; }
static int __reduce_add_sync(unsigned, int value) {
  const uint32_t mine[8] = {uint32_t(value)};
  const auto all = together(mine, 1);
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i][0];
  return int(sum);
}
static int as_new(int x) { return x; }
static void __syncwarp() { __ballot_sync(0, false); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
static float __int_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float __fdividef(float x, float y) { return x / y; }
static float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static float __fmul_rn(float x, float y) { return x * y; }
static void __threadfence() {}
template <class T> static T __ldcg(const T* from) { return *from; }
static uint32_t count_up(uint32_t* at, int by = 1) { const uint32_t before = *at; *at += by; return before; }
static void read_part(float4& found, const float* from, int apart, int at, int there) {
  if (at < there) found = *reinterpret_cast<const float4*>(from + apart / 4 * at);
  else found = {0, 0, 0, 0};
}
static uint32_t atomicAdd(uint32_t* at, uint32_t by) { const uint32_t before = *at; *at += by; return before; }
static void named_barrier(int count, int id) {
  Named& one = blocks[self / block_threads].named[id];
  const int turn = one.turn;
  if (++one.arrived == count) one.arrived = 0, ++one.turn, ++events;
  wait_while(one.turn, turn);
}
static void __syncthreads() { named_barrier(block_threads, 0); }

// ---- Barriers in shared memory, and copies --------------------------------------------------------
struct Barrier {  // 8 bytes, as there
  int16_t count, pending;
  int32_t packed;  // bytes that are to come, and the parity of the phase in bit 0
  int bytes() const { return packed >> 1; }
  void check() {
    if (pending < 0) fail("too many arrive at a barrier", 4);
    if (pending == 0 && bytes() == 0) pending = count, packed ^= 1, ++events;
  }
  void more(int by) { packed += by * 2; }
};
static std::deque<std::function<void()>> copies;
namespace cutlass {
struct half_t {
  uint16_t bits;
  operator float() const { _Float16 x; std::memcpy(&x, &bits, 2); return float(x); }
};
struct bfloat16_t {
  uint16_t bits;
  operator float() const { return __int_as_float(uint32_t(bits) << 16); }
};
namespace arch {
struct ClusterBarrier {
  Barrier barrier;
  void init(int count) { barrier = {int16_t(count), int16_t(count), 0}; }
  void arrive() { --barrier.pending, barrier.check(); }
  void wait(uint32_t phase) const {
    wait_while(barrier.packed, int(phase), 1);
  }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(int bytes) { barrier.more(bytes), arrive(); }
};
struct NamedBarrier {
  static void sync(int count, int id) { named_barrier(count, id); }
};
inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}
}  // namespace arch
}  // namespace cutlass
namespace cute {
struct alignas(64) TmaDescriptor {
  const uint8_t* base;
  int64_t pitches[4];
  int32_t extents[5], box[5], span, bytes;
  char rest[40];
};
static_assert(sizeof(TmaDescriptor) == 128);
namespace TMA { enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST }; }
inline void cluster_arrive() {
  fibers[self]->turn = of_cluster.turn;
  if (++of_cluster.arrived == int(fibers.size())) of_cluster.arrived = 0, ++of_cluster.turn, ++events;
}
inline void cluster_wait() { wait_while(of_cluster.turn, fibers[self]->turn); }
inline void prefetch_tma_descriptor(const TmaDescriptor*) {}
inline uint32_t cast_smem_ptr_to_uint(const void* at) { return uint32_t((const uint8_t*)at - shared_memory); }
struct SM90_TMA_LOAD_5D {
  static void copy(const TmaDescriptor* map, uint64_t* full, uint64_t, void* to, int c0, int c1, int c2, int c3, int c4) {
    const int at[5] = {c0, c1, c2, c3, c4};
    const uint32_t start = cast_smem_ptr_to_uint(to);
    if (start % 128 || c4 < 0 || c4 >= map->extents[4] || c3 < 0 || c3 >= map->extents[3]) fail("a box is nowhere", 4);
    auto whole = [=, m = *map, memory = shared_memory, first = std::array<int, 5>{c0, c1, c2, c3, c4}] {
      int offset = 0;
      for (int piece = 0; piece < m.box[2]; ++piece)
        for (int row = 0; row < m.box[1]; ++row, offset += m.span) {
          const int64_t there[5] = {first[0], first[1] + row, first[2] + piece, first[3], first[4]};
          const bool inside = there[1] >= 0 && there[1] < m.extents[1] && there[2] < m.extents[2];
          const uint8_t* from = m.base + there[0] * m.bytes;
          for (int i = 0; i < 4; ++i) from += there[i + 1] * m.pitches[i];
          for (int column = 0; column < m.span; column += 16) {
            uint32_t place = start + offset + column;
            place ^= (place >> 7) % (m.span / 16) << 4;
            if (inside) std::memcpy(memory + place, from + column, 16);
            else std::memset(memory + place, 0, 16);
          }
        }
      auto& barrier = *reinterpret_cast<Barrier*>(full);
      barrier.more(-offset), barrier.check();
    };
    (void)at;
    copies.push_back(whole);
  }
};
}  // namespace cute

template <class T, class Barriers> static void send(T& own, T value, Barriers& full, int rank) {
  uint8_t *const there = blocks[rank].shared, *const to = there + ((uint8_t*)&own - shared_memory);
  auto* const barrier = (Barrier*)(there + ((uint8_t*)&full - shared_memory));
  copies.push_back([=] {
    std::memcpy(to, &value, sizeof(T));
    barrier->more(-int(sizeof(T))), barrier->check();
  });
}

// ---- Instructions -----------------------------------------------------------------------------------
static bool bf16;  // what the kernel computes in, else fp16
static float number(uint16_t bits) { return bf16 ? float(cutlass::bfloat16_t{bits}) : float(cutlass::half_t{bits}); }
static uint16_t rounded(float x) {  // to the nearest, and ties to even
  if (!bf16) { const _Float16 y = _Float16(x); uint16_t bits; std::memcpy(&bits, &y, 2); return bits; }
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
  const uint32_t mine[8] = {a[0], a[1], a[2], a[3], low, high};
  const auto all = together(mine, 6);
  const int lane = threadIdx.x % 32;
  auto half = [](uint32_t word, int i) { return number(uint16_t(word >> 16 * i)); };
  for (int i = 0; i < 4; ++i) {
    float sum = d[i];
    for (int k = 0; k < 16; ++k)
      sum += half(all[lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) *
             half(all[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
    d[i] = sum;
  }
}
static void read_any(uint32_t (&found)[4], uint32_t from, bool transposed) {
  const uint32_t mine[8] = {from};
  const auto all = together(mine, 1);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    if (!transposed) {
      std::memcpy(&found[i], shared_memory + all[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
    } else {
      uint16_t halves[2];
      for (int j = 0; j < 2; ++j)
        std::memcpy(&halves[j], shared_memory + all[i * 8 + lane % 4 * 2 + j][0] + lane / 4 * 2, 2);
      found[i] = halves[0] | uint32_t(halves[1]) << 16;
    }
  }
}
static void read(uint32_t (&found)[4], uint32_t from) { read_any(found, from, false); }
static void read_transposed(uint32_t (&found)[4], uint32_t from) { read_any(found, from, true); }
static uint32_t pair(float low, float high) { return rounded(low) | uint32_t(rounded(high)) << 16; }
static float fast_exp2(float x) { return std::exp2f(x); }
static float fast_log2(float x) { return std::log2f(x); }
static void copy_scale(float* to, const float* from) { *to = *from; }
static void arrive_with_copies(cutlass::arch::ClusterTransactionBarrier& full) { full.arrive(); }

static uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = select >> 4 * i & 15, from = (digit & 4 ? b : a) >> digit % 4 * 8 & 0xff;
    d |= (digit & 8 ? (from & 0x80 ? 0xff : 0) : from) << 8 * i;
  }
  return d;
}
static uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int i = 0; i < 32; i += 16)
    d |= uint32_t(rounded(number(uint16_t(a >> i)) * number(uint16_t(b >> i)) + number(uint16_t(c >> i)))) << i;
  return d;
}
static uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) { return fused(a, b, c); }
static uint32_t multiply_bf16(uint32_t a, uint32_t b) { return fused(a, b, 0x80008000); }
static uint32_t add_fp16(uint32_t a, uint32_t b) { return fused(a, 0x3c003c00, b); }
static uint32_t fp16_of_e4m3(uint32_t word, int half) {
  uint32_t d = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = word >> (16 * half + 8 * i) & 0xff, e = code >> 3 & 15, m = code & 7;
    const float size = std::ldexp(float(e ? m + 8 : m), int(max(e, 1u)) - 10);
    const float value = (code & 0x7f) == 0x7f ? NAN : (code & 0x80 ? -size : size);
    d |= uint32_t(rounded(value)) << 16 * i;
  }
  return d;
}

// ---- A launch: clusters one after the other, the warps of their blocks in any order ------------------
static void run_cluster(int first, int size, int threads, int bytes) {
  fibers.clear();
  blocks.assign(size, Block());
  of_cluster = Named();
  copies.clear();
  first_block = first, block_threads = threads;
  std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> memory;
  for (auto& one : blocks) {
    one.warps.assign((threads + 31) / 32, Warp());
    one.shared = (uint8_t*)std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
    std::memset(one.shared, 0xff, bytes);  // NaN, in whatever type
    memory.emplace_back(one.shared, std::free);
  }
  for (int i = 0; i < size * threads; ++i) {
    fibers.emplace_back(new Fiber);
  }
  for (int idle = 0;;) {
    const long before = events;
    bool left = false;
    std::vector<int> order(size * threads / 32);
    for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
    std::shuffle(order.begin(), order.end(), random_bits);
    for (int warp : order)
      for (int i = warp * 32; i < warp * 32 + 32; ++i) {
        if (fibers[i]->done) continue;
        left = true;
        in_fiber = true;
        resume(i);
        in_fiber = false;
        if (failed) return;
      }
    if (!left) break;
    if (!copies.empty() && (events == before || random_bits() % 8 == 0)) {
      const size_t which = random_bits() % copies.size();
      auto one = copies[which];
      copies.erase(copies.begin() + which);
      one();
      ++events;
    }
    idle = events == before ? idle + 1 : 0;
    if (idle > 2) fail("all wait", 3);
    if (failed) return;
  }
  if (!copies.empty()) fail("copies are left", 4);
}
