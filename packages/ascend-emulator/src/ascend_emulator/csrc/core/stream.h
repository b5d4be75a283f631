// Streams and events. A stream runs its tasks in order. This version runs a task where it is submitted, on
// the submitting thread (torch_npu's task queue already takes operators off the Python thread).
#pragma once
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
  void synchronize();
  bool idle() const { return true; }
};

struct Event {
  std::atomic<bool> recorded{false};
  std::chrono::steady_clock::time_point time{};
};

// An operator failed on the calling thread. torch_npu's queue thread ends at that, and torch_npu drops whatever is queued later without an
// error, once it has raised this one: so from then on synchronizing fails.
void operator_failed(const char* name);

Stream& stream_of(void* handle);  // null is the current device's default stream

}  // namespace emu
