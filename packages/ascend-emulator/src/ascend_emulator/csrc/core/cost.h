// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Bytes and FLOPs of an operator where they do not follow from the sizes of its arguments: it
// accesses a part of a cache, or multiplies matrices internally. Operators report them while they
// compute; TaskTrace (trace.h) adds them to the task's Work.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

namespace emu::cost {

struct Counters {  // of one execution of an operator
  std::mutex mutex;
  double bytes = 0, flops = 0;  // bytes: difference to the arguments' sizes; flops: replaces the
                                // estimate from shapes
  int item = 0;
  double link = 0;  // bytes that an operator sends to other ranks
  int ranks = 0;
  const char* law = nullptr;       // instead of those of its name (laws.toml)
  double uncounted = 0;            // bytes that this law does not count
  std::vector<const void*> parts;  // tensors that are accessed in part
};

Counters* current();  // of this thread; null without tracing

// Sets the thread's counters; also for an operator's helper threads.
class Scope {
 public:
  explicit Scope(Counters* counters);
  ~Scope();

 private:
  Counters* before_;
};

// The operator accesses `bytes` of an argument of `size` bytes. Several calls add up.
void partial_access(const void* argument, size_t size, double bytes);
// The operator's time is by this law, which its name does not tell, and which does not count some
// of its bytes.
void by_law(const char* law, double uncounted);
// The operator sends other ranks this number of bytes.
void add_sent(double bytes, int ranks);
// FLOPs on elements of `item` bytes.
void add_flops(double flops, int item);

}  // namespace emu::cost
