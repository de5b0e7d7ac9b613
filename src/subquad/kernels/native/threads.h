// Threads and their memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Runs work(0) ... work(units - 1), each once.
template <class Work>
[[maybe_unused]] void divide(int64_t units, int threads, const Work& work) {
  threads = (int)std::min<int64_t>(threads, units);
  if (threads <= 1) {
    for (int64_t i = 0; i < units; i++) work(i);
    return;
  }
#if defined(_OPENMP)
  // The threads that PyTorch's operations run on: those wait for more work for a while before they
  // sleep, and other threads would have to share their cores with them.
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < units; i++) work(i);
#else
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < units;) work(i);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) {
    try {
      others.emplace_back(run);
    } catch (const std::system_error&) {
      break;  // no more threads: this one does the rest
    }
  }
  run();
  for (auto& one : others) one.join();
#endif
}

// A thread's memory, kept from call to call.
struct Arena {
  std::vector<float> held;
  float* base() {
    auto at = reinterpret_cast<uintptr_t>(held.data());
    return held.data() + (64 - at % 64) % 64 / sizeof(float);
  }
};

thread_local Arena arena;

// Matrices cut from the thread's arena, first counted, then placed.
class Room {
 public:
  template <class Lay>
  explicit Room(const Lay& lay) {
    lay(*this);  // counts
    if (arena.held.size() < need_ + 16) {
      arena.held.clear();
      arena.held.shrink_to_fit();
      arena.held.resize(need_ + 16);
    }
    base_ = arena.base();
    need_ = 0;
    lay(*this);  // places
  }
  void take(float*& p, int64_t floats) {
    if (base_) p = base_ + need_;
    need_ += (size_t)((floats + 15) / 16 * 16);
  }

 private:
  float* base_ = nullptr;
  size_t need_ = 0;
};

}  // namespace
