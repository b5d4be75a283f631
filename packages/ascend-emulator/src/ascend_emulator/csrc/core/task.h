// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Tasks, and what the adversary (adversary.h) and the trace (trace.h) see of the stream that runs
// them.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host_access.h"

namespace emu {

namespace laws {
struct Rule;  // laws.h
}

using Clock = std::chrono::steady_clock;
using Deadline = std::optional<Clock::time_point>;  // nullopt: no timeout

class Stream;

// Position in a stream.
struct Mark {
  std::shared_ptr<Stream> stream;
  uint64_t ticket = 0;  // reached when the stream has completed this many tasks
  std::atomic<bool> stamped{false};
  Clock::time_point time{};  // when it was reached
  double modelled = 0;       // seconds, by the laws (laws.h)
};

enum class Kind : uint8_t { op, copy, record, wait, host, collective, graph };

// Cost of a task, for the trace and modelled times; filled in only while they are enabled.
struct Work {
  double bytes = 0;  // of device memory, read and written
  double flops = 0;
  int item = 0;        // element size of a matrix product in bytes; 0: vector cores
  double link = 0;     // bytes over links, of collectives
  std::string shapes;  // of its arguments
  Clock::time_point called{};
  double earliest = 0;               // seconds of the modelled clock when the host launched it
  const laws::Rule* rule = nullptr;  // of an operator; null: it has no law
  double rows = 1, first = 0;        // rows of the result, and elements of the first tensor
  int ranks = 0;                     // of a collective
};

struct Task {
  const char* name;
  std::function<void()> run;
  Kind kind = Kind::op;
  bool blocks = false;  // may wait for something other than this process's streams
  bool brief =
      false;  // does not wait and computes little: an idle stream runs it in the caller's thread
  std::shared_ptr<Mark> waits_for{};  // of Kind::wait
  Work work{};
  // Of copies, and of the replay of a graph that has some: filled in if races are looked for.
  std::vector<host_access::Range> pinned{};
  host_access::Guards guards{};  // from when the task is queued
};

// A stream, as the adversary and the trace see it.
class Queue {
 public:
  Queue(int device, int id) : device(device), id(id) {}
  virtual ~Queue() = default;
  struct Head {
    bool any = false;
    std::shared_ptr<Queue> blocked_by{};  // the stream whose event was not reached yet
  };
  virtual Head head() = 0;
  virtual uint64_t completed() const = 0;

  const int device, id;
  double modelled = 0;  // device time in seconds by the laws; accessed by the worker only
};

}  // namespace emu
