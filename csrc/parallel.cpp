// The thread pool behind parallel.h. Compiled without any tier's instructions.
//
// Protocol. `gate` packs a job's number (high 32 bits), an open bit and the count of workers inside.
// The caller writes the job, opens the gate, works itself, closes the gate and waits until nobody is
// inside. A worker enters by raising the count while the gate is open; one that comes too late finds
// it closed and waits for the next job. So the caller never waits for a thread that has not begun:
// on shared cores a descheduled worker costs its share of the work, not a time slice a job.
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

constexpr uint64_t kOpen = uint64_t(1) << 31;
constexpr uint64_t kCount = kOpen - 1;
// A pass has a job every 5 to 20 us and a step's Python takes some 200 us: workers stay awake so long.
constexpr int64_t kSpinNanoseconds = 500000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

class Pool {
 public:
  void run(int32_t threads, quasar_body body, void* context) {
    // A second caller, or a body that calls, does its work alone: bodies share work dynamically.
    if (threads <= 1 || busy_.exchange(true, std::memory_order_acquire)) {
      body(context, 0);
      return;
    }
    while (workers_ < threads - 1) std::thread(&Pool::work, this, ++workers_).detach();
    body_ = body;
    context_ = context;
    team_ = threads;
    const uint64_t job = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
    gate_.store(job << 32 | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      awake_.notify_all();
    }
    body(context, 0);
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) & kCount; ++spins) {
      relax();
      if (spins > 10000) sched_yield();
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  void work(int32_t index) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t gate = await(seen);
      seen = gate >> 32;
      bool entered = false;
      while (gate >> 32 == seen && gate & kOpen && !entered)
        entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel);
      if (!entered) continue;
      if (index < team_) body_(context_, index);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  // The gate's word once its job is another than `seen`.
  uint64_t await(uint64_t seen) {
    const int64_t end = now() + kSpinNanoseconds;
    do {
      for (int i = 0; i < 64; ++i) {
        const uint64_t gate = gate_.load(std::memory_order_acquire);
        if (gate >> 32 != seen) return gate;
        relax();
      }
    } while (now() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [&] { return gate_.load(std::memory_order_seq_cst) >> 32 != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return gate_.load(std::memory_order_acquire);
  }

  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> busy_{false};
  std::mutex mutex_;
  std::condition_variable awake_;
  quasar_body body_ = nullptr;
  void* context_ = nullptr;
  int32_t team_ = 0, workers_ = 0;
};

Pool* pool = nullptr;  // never destroyed: workers live until the process ends

// A forked child has no workers: it starts with a new pool.
void make_pool() { pool = new Pool; }

}  // namespace

extern "C" void quasar_parallel(int32_t threads, quasar_body body, void* context) {
  static std::once_flag once;
  std::call_once(once, [] {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
  });
  pool->run(threads, body, context);
}
