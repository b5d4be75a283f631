// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Graph capture and replay (aclmdlRI). Replay runs one node at a time in an order that their
// dependencies allow: that of the capture, or one chosen by the adversary's seed.
#ifndef ASCEND_EMULATOR_CORE_GRAPH_H
#define ASCEND_EMULATOR_CORE_GRAPH_H
#include <map>

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

struct Capture {
  const std::shared_ptr<Graph> graph;  // its mutex guards the streams
  const CaptureMode mode;
  const std::thread::id thread;
  const int origin;  // id of the first stream
  std::map<int, CapturedStream> streams;
  bool ended = false;
};

// Record the call in a capture; false if no capture is concerned.
bool capture_task(Stream& stream, Task& task);
bool capture_record(Stream& stream, Event& event);
bool capture_wait(Stream& stream, Event& event);
// Adds the task to the task-group update that is open on the stream; false if none is.
bool add_to_update(Stream& stream, Task& task);
void end_update(const Stream& stream);  // the stream was destroyed
void end_captures(int device);          // the device is reset: its captures end, without graphs

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_GRAPH_H
