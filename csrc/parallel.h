// Threads for the kernels: OpenMP teams (torch's own libgomp at run time, so both use one pool).
// Everything here has internal linkage, because tier files are compiled with different instructions.
#pragma once
#include <omp.h>

#include <cstdint>

namespace {

// body(thread, threads) on a team. `threads` in the body is the team's true size.
template <class Body>
inline void parallel(int32_t threads, const Body& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

// All threads of the team wait for each other; inside `parallel` only.
inline void barrier(int32_t threads) {
  if (threads > 1) {
#pragma omp barrier
  }
}

// A counter that hands out 0, 1, 2 ... to the threads of a team as they become free.
class Queue {
 public:
  int64_t next() { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }

 private:
  alignas(64) int64_t next_ = 0;
};

// The part of 0..count-1 that thread `thread` of `threads` works on: begin and end.
struct Part {
  int64_t begin, end;
};
inline Part part_of(int64_t count, int32_t thread, int32_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace
