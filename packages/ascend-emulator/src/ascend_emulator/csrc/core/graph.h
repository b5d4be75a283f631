// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Graph capture and replay (aclmdlRI). Replay runs one node at a time in an order that their
// dependencies allow: that of the capture, or one chosen by the adversary's seed.
#pragma once
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "stream.h"

namespace emu {

struct Node {
  std::shared_ptr<const Task> task;
  std::vector<int> after;  // indices of the nodes that it depends on
  int stream;              // id of the captured stream
};

struct Graph {
  Graph(int device, int id) : device(device), id(id) {}
  ~Graph();

  void run(Stream& on);
  bool blocks();
  std::vector<host_access::Range> pinned();  // of its copies

  const int device, id;
  std::mutex mutex;  // guards all below, and the capture; after a capture only the nodes' tasks
                     // change, by updates
  std::vector<Node> nodes;
  bool capturing = false;
  std::string invalid;  // reason why the capture is invalid; empty if valid
  std::vector<std::shared_ptr<Graph>> branches;  // of conditional nodes
  std::vector<std::shared_ptr<struct Condition>> conditions;
  int streams = 0;  // reserved on the device
  std::atomic<uint64_t> replays{0};
};

// The value that a conditional node reads, in device memory.
struct Condition {
  uint64_t* address;
  uint64_t initial;
  bool assign;  // set to the initial value at each launch
  ~Condition();
};

// A task group: nodes that an update may replace.
struct Group {
  std::weak_ptr<Graph> graph;
  std::vector<int> nodes;
};

enum class CaptureMode : int32_t { global = 0, thread_local_ = 1, relaxed = 2 };

struct CapturedStream {
  std::shared_ptr<Stream> stream;
  int last = -1;                 // its latest node, -1 if none yet
  std::vector<int> joined;       // further dependencies of its next node
  std::shared_ptr<Group> group;  // open task group
};

struct Capture : TaskSink {
  Capture(std::shared_ptr<Graph> graph, CaptureMode mode, int origin)
      : graph(std::move(graph)), mode(mode), origin(origin) {}
  bool take(Stream& stream, Task& task) override;

  const std::shared_ptr<Graph> graph;  // its mutex guards the streams
  const CaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();
  const int origin;  // id of the first stream
  std::map<int, CapturedStream> streams;
  bool ended = false;
};

// The capture that the stream takes part in, null if none.
inline std::shared_ptr<Capture> capture_of(const Stream& stream) {
  return std::static_pointer_cast<Capture>(stream.capture.get());
}

// Open task-group update of a stream, with its tasks.
struct Update : TaskSink {
  explicit Update(std::shared_ptr<Group> group) : group(std::move(group)) {}
  bool take(Stream& stream, Task& task) override;

  const std::shared_ptr<Group> group;
  std::mutex mutex;  // guards the next two
  std::vector<Task> tasks;
  bool ended = false;
};

void begin_capture(void* stream, const std::shared_ptr<Graph>& graph, int32_t mode);
// Ends a capture and releases its streams; returns why it is invalid, nothing if it has ended
// before.
std::optional<std::string> end_capture(Capture& capture);
// Sets the calling thread's mode, and returns the one before.
CaptureMode exchange_capture_mode(CaptureMode mode);
// Throws if the mode of an active capture, on any stream, forbids this call.
void check_capture_mode(const char* call);

// Record the call in a capture; false if no capture is concerned.
bool capture_record(Stream& stream, Event& event);
bool capture_wait(Stream& stream, Event& event);

}  // namespace emu
