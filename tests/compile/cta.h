// The threads of a CTA as coroutines of one thread of the host: each runs until it waits at a barrier, and they take
// turns in the same order each time. Threads of the host would wait for the kernel of its system at each barrier.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
class Cta {
 public:
  // Calls `body` in each thread of a CTA, until all have returned.
  template <class Body> static void run(int threads, const Body& body) {
    Cta cta(threads);
    cta.call_ = [](const void* of) { (*static_cast<const Body*>(of))(); };
    cta.body_ = &body;
    running_ = &cta;
    for (int i = 0; i < threads; ++i) cta.begin(i);
    for (cta.left_ = threads; cta.left_ > 0;) {
      cta.moved_ = false;
      for (int i = 0; i < threads; ++i) {
        if (!cta.ended_[i]) threadIdx.x = i, swapcontext(&cta.host_, &cta.contexts_[i]);
      }
      if (!cta.moved_) std::puts("threads wait at a barrier that others do not reach"), std::abort();
    }
  }

  // Waits for all threads of the CTA, or for those of the warp.
  static void wait_for_all() { running_->wait(running_->all_, running_->contexts_.size()); }
  static void wait_for_warp() { running_->wait(running_->warps_[threadIdx.x / 32], 32); }

 private:
  static constexpr int kStack = 1 << 16;  // bytes
  struct Barrier { int arrived = 0, turn = 0; };
  explicit Cta(int threads)
      : contexts_(threads), stacks_(threads * kStack), ended_(threads), warps_(threads / 32) {}
  void wait(Barrier& barrier, int threads) {
    const int thread = threadIdx.x, turn = barrier.turn;
    if (++barrier.arrived == threads) {
      barrier.arrived = 0, ++barrier.turn, moved_ = true;
      return;
    }
    while (barrier.turn == turn) swapcontext(&contexts_[thread], &host_);
  }
  void begin(int i) {
    getcontext(&contexts_[i]);
    contexts_[i].uc_stack.ss_sp = &stacks_[i * kStack];
    contexts_[i].uc_stack.ss_size = kStack;
    contexts_[i].uc_link = &host_;
    makecontext(&contexts_[i], entry, 0);
  }
  static void entry() {
    Cta& cta = *running_;
    const int thread = threadIdx.x;
    cta.call_(cta.body_);
    cta.ended_[thread] = true, cta.moved_ = true, --cta.left_;
  }
  static inline Cta* running_;
  void (*call_)(const void*);
  const void* body_;
  ucontext_t host_;
  std::vector<ucontext_t> contexts_;
  std::vector<char> stacks_;
  std::vector<bool> ended_;
  std::vector<Barrier> warps_;
  Barrier all_;
  int left_ = 0;
  bool moved_ = false;
};
static void __syncthreads() { Cta::wait_for_all(); }
static void __syncwarp() { Cta::wait_for_warp(); }
