// Threads for the kernels: one pool, work handed out dynamically, nobody waited for who has not begun.
// Everything inline here has internal linkage, because tier files are compiled with different
// instructions.
#pragma once
#include <cstdint>

extern "C" {
typedef void (*quasar_body)(void* context, int32_t thread);

// body(context, thread) on the caller (thread 0) and on as many of threads - 1 workers as come in
// time: bodies take their work from a shared queue and must not wait for each other.
void quasar_parallel(int32_t threads, quasar_body body, void* context);
}

namespace {

// body(thread) on up to `threads` threads; returns when all that began have ended.
template <class Body>
inline void parallel(int32_t threads, const Body& body) {
  quasar_parallel(
      threads,
      [](void* context, int32_t thread) { (*static_cast<const Body*>(context))(thread); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Hands out 0, 1, 2 ... to threads as they become free.
class Queue {
 public:
  int64_t next() { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }

  // work(i) for what this thread gets of 0..count-1, ascending.
  template <class Work>
  void each(int64_t count, const Work& work) {
    for (int64_t i = next(); i < count; i = next()) work(i);
  }

 private:
  alignas(64) int64_t next_ = 0;
};

}  // namespace
