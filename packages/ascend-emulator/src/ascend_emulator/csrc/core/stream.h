// Streams and events. A stream runs its tasks in order. This version runs a task where it is submitted, on
// the submitting thread (torch_npu's task queue already takes operators off the Python thread).
#ifndef ASCEND_EMULATOR_CORE_STREAM_H
#define ASCEND_EMULATOR_CORE_STREAM_H
#include <atomic>
#include <chrono>
#include <functional>

#include "device.h"

namespace emu {

struct Stream {
  explicit Stream(int device);
  const int device;
  const int id;

  // Runs the task in stream order; throws what it throws.
  template <class Task>
  void submit(Task&& task) { task(); }
  void synchronize() { check_queue(); }
  bool idle() const { return true; }
};

struct Event {
  std::atomic<bool> recorded{false};
  std::chrono::steady_clock::time_point time{};
};

Stream& stream_of(void* handle);  // null is the current device's default stream

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_STREAM_H
