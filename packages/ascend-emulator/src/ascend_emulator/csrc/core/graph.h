// Graphs ("model RI"): what a capture records of the streams it follows, to be run again. Replay runs the nodes one after the
// other in an order that their dependencies allow: that of the capture, or one that the adversary's seed chooses.
#ifndef ASCEND_EMULATOR_CORE_GRAPH_H
#define ASCEND_EMULATOR_CORE_GRAPH_H
#include <map>
#include <set>

#include "stream.h"

namespace emu {

struct Node {
  Task task;
  std::vector<int> after;  // nodes that it waits for
  int stream;              // id of the stream that it was captured from
};

struct Graph {
  Graph(int device, int id) : device(device), id(id) {}
  ~Graph();

  void run(Stream& on);
  bool blocks() const;

  const int device, id;
  std::mutex mutex;  // of the nodes' tasks, which an update replaces
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<Graph>> branches;  // of conditional nodes
  std::vector<std::shared_ptr<struct Condition>> conditions;
  int streams = 0;  // that it holds on the device
  std::atomic<uint64_t> replays{0};
};

// The value that a conditional node reads, in device memory.
struct Condition {
  uint64_t* address;
  uint64_t initial;
  bool assign;  // the initial value at each launch
  ~Condition();
};

// A task group: nodes that an update may replace.
struct Group {
  std::weak_ptr<Graph> graph;
  std::vector<int> nodes;
};

enum class CaptureMode : int32_t { global = 0, thread_local_ = 1, relaxed = 2 };

struct Capture {
  std::shared_ptr<Graph> graph;
  CaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::map<Stream*, int> last;                 // the latest node of each stream that takes part, -1 none yet
  std::map<Stream*, std::vector<int>> joined;  // what its next node waits for besides
  std::string invalid;                         // why it cannot become a graph any more
  std::shared_ptr<Group> group;                // open task group
};

void capture_task(Stream& stream, Task task);
// Whether the call was about a capture, which then has recorded it.
bool capture_record(Stream& stream, Event& event);
bool capture_wait(Stream& stream, Event& event);
// Whether an update of a task group is open on the stream, which then has taken the task.
bool takes_update(Stream& stream, Task& task);

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_GRAPH_H
