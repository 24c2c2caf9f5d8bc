// What an emitted block-sparse GEMM with a dynamic scheduler needs of CUDA, on the threads of the host: a thread for
// each producer, each consumer warpgroup and each that stores zeros. Loads and MMAs are records of what they would
// have had. All waits share a mutex, so that one in which all threads wait in vain is found.
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace emulated {

static std::mutex mutex;
static std::condition_variable changed;
static std::list<const std::function<bool()>*> waiting;
static size_t alive;

[[noreturn]] static void fail(const char* why) {
  std::puts(why);
  std::fflush(stdout);
  std::_Exit(1);
}

// With the mutex: there is someone left who goes on.
static void require_progress() {
  if (waiting.size() < alive || alive == 0) return;
  for (const auto* holds : waiting)
    if ((*holds)()) return;
  fail("all wait, and none goes on");
}

static void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& holds) {
  if (holds()) return;
  const auto own = waiting.insert(waiting.end(), &holds);
  require_progress();
  changed.wait(lock, holds);
  waiting.erase(own);
}

static void ends() {
  const std::unique_lock<std::mutex> lock(mutex);
  --alive;
  require_progress();
}

}  // namespace emulated

static thread_local struct { int x; } blockIdx;
static thread_local char* own_memory;      // shared memory of this CTA
static char** cluster_memory(int rank);    // of those of its cluster

template <class T>
static T& of_rank(const T& one, int rank) {
  const ptrdiff_t offset = reinterpret_cast<const char*>(&one) - own_memory;
  return *reinterpret_cast<T*>(*cluster_memory(rank) + offset);
}

// An mbarrier: a phase is over when all have arrived, and all bytes that were expected.
struct Barrier {
  int count, pending, bytes;
  uint32_t phase;

  void init(int arrivals) { count = pending = arrivals, bytes = 0, phase = 0; }
  void change(int arrivals, int more) {
    const std::unique_lock<std::mutex> lock(emulated::mutex);
    pending -= arrivals;
    bytes += more;
    if (pending < 0) emulated::fail("one arrives at a barrier too often");
    if (pending > 0 || bytes != 0) return;
    pending = count;
    phase ^= 1;
    emulated::changed.notify_all();
  }
  void arrive() { change(1, 0); }
  void arrive(int cta, bool holds) { if (holds) of_rank(*this, cta).change(1, 0); }
  void arrive_and_expect_tx(int more) { change(1, more); }
  void wait(uint32_t parity) {
    std::unique_lock<std::mutex> lock(emulated::mutex);
    emulated::wait_until(lock, [&] { return phase != parity; });
  }
};
using FullBarrier = Barrier;
using EmptyBarrier = Barrier;

static int atomicAdd(int* counter, int value) { return __atomic_fetch_add(counter, value, __ATOMIC_SEQ_CST); }
static void __nanosleep(uint32_t) {}
static void __syncwarp() {}
struct uint4 { uint32_t x, y, z, w; };
#define CUTE_NO_UNROLL

namespace cute {
struct TmaDescriptor { int rows; };
static uint32_t cast_smem_ptr_to_uint(const void* pointer) { return static_cast<const char*>(pointer) - own_memory; }
static void store_shared_remote(uint32_t value, uint32_t address, uint32_t barrier, int rank) {
  *reinterpret_cast<volatile uint32_t*>(*cluster_memory(rank) + address) = value;
  reinterpret_cast<Barrier*>(*cluster_memory(rank) + barrier)->change(0, -4);
}
static void tma_store_fence() {}
static void tma_store_arrive() {}
template <int> static void tma_store_wait() {}
struct SM90_TMA_STORE_2D {
  static void copy(const TmaDescriptor*, const uint8_t*, int column, int row);
};
}  // namespace cute

namespace cutlass::arch {
// Named barriers of a CTA for two consumers: one waits, the other may go on.
struct NamedBarrier {
  struct State { int waits, arrivals, over; };
  static State& of(int number);
  static void meet(int number, bool waits) {
    std::unique_lock<std::mutex> lock(emulated::mutex);
    State& state = of(number);
    ++(waits ? state.waits : state.arrivals);
    if (state.waits > 1 || state.arrivals > 1) emulated::fail("one is let go twice");
    const int before = state.over;
    if (state.waits + state.arrivals == 2) {
      state = {0, 0, before + 1};
      emulated::changed.notify_all();
    }
    if (waits) emulated::wait_until(lock, [&] { return state.over != before; });
  }
  static void sync(int, int number) { meet(number, true); }
  static void arrive(int, int number) { meet(number, false); }
};
}  // namespace cutlass::arch
