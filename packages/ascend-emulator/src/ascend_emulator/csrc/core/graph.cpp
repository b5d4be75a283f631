// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "graph.h"

#include <algorithm>
#include <set>
#include <utility>

#include "adversary.h"
#include "process.h"
#include "trace.h"

namespace emu {
namespace {

// Active captures, for calls that a capture forbids on other streams and threads too.
struct Captures {
  std::mutex mutex;
  std::set<Capture*> active;
};
thread_local CaptureMode thread_mode = CaptureMode::global;

// The functions below with a Capture are called with its graph's mutex locked.
void invalidate(Graph& graph, const std::string& why) {
  if (graph.invalid.empty()) graph.invalid = why;
}

void enter(Stream& stream, const std::shared_ptr<Capture>& capture, Status status) {
  if (capture->streams.count(stream.id)) return;
  reserve_streams(capture->graph->device, 1, status);
  ++capture->graph->streams;
  check(stream.capture.set(capture), kStreamCaptured, "the stream is being captured already");
  capture->streams[stream.id].stream = stream.shared_from_this();
}

void append(Capture& capture, const Stream& stream, Task task) {
  auto& nodes = capture.graph->nodes;
  const int index = static_cast<int>(nodes.size());
  const int limit = chip().graph_nodes;
  if (index >= limit) {
    invalidate(*capture.graph,
        text("a graph holds ", limit, " nodes on this chip; ", task.name, " would be one more"));
    throw Error(kNoResource, capture.graph->invalid);
  }
  auto& of = capture.streams.at(stream.id);
  Node node{std::make_shared<const Task>(std::move(task)), {}, stream.id};
  if (of.last >= 0) node.after.push_back(of.last);
  for (int other : of.joined)
    if (other >= 0 && std::find(node.after.begin(), node.after.end(), other) == node.after.end())
      node.after.push_back(other);
  of.joined.clear();
  of.last = index;
  nodes.push_back(std::move(node));
  if (of.group) of.group->nodes.push_back(index);
}

}  // namespace

Graph::~Graph() { reserve_streams(device, -streams, kOk); }

Condition::~Condition() {
  try {
    for (int i = 0; i < device_count(); ++i)
      if (device(i).owns(address)) device(i).release(address);
  } catch (const std::exception&) {}
}

bool Graph::blocks() {
  std::lock_guard lock(mutex);
  return std::any_of(
             nodes.begin(), nodes.end(), [](const Node& node) { return node.task->blocks; }) ||
         std::any_of(
             branches.begin(), branches.end(), [](const auto& branch) { return branch->blocks(); });
}

std::vector<host_access::Range> Graph::pinned() {
  std::lock_guard lock(mutex);
  std::vector<host_access::Range> all;
  for (const auto& node : nodes)
    all.insert(all.end(), node.task->pinned.begin(), node.task->pinned.end());
  for (const auto& branch : branches) {
    const auto own = branch->pinned();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

void Graph::run(Stream& on) {
  const uint64_t replay = replays++;
  for (const auto& condition : conditions)
    if (condition->assign)
      *static_cast<uint64_t*>(to_kernel(condition->address)) = condition->initial;
  const int count = static_cast<int>(nodes.size());
  const double begin = on.modelled;
  double last = begin;
  std::vector<double> ends(count);  // of the nodes, on the modelled clock
  const auto run_node = [&](int node) {
    check_not_aborted();
    std::shared_ptr<const Task> task;
    {
      std::lock_guard lock(mutex);
      task = nodes[node].task;
    }
    try {
      // A node begins when those before it have ended, whichever order they run in here.
      on.modelled = begin;
      for (int before : nodes[node].after) on.modelled = std::max(on.modelled, ends[before]);
      const int stream = nodes[node].stream;
      TaskTrace observed(on, *task, stream == nodes[0].stream ? on.id : stream);
      task->run();
    } catch (const std::exception& e) {
      const auto error = error_of(e);
      throw Error(error.status,
          text(task->name, " (node ", node, " of graph ", id, "): ", error.what()), error.classed);
    }
    ends[node] = on.modelled;
    last = std::max(last, on.modelled);
  };
  if (!Adversary::on()) {
    for (int i = 0; i < count; ++i) run_node(i);  // a node depends on earlier ones
    on.modelled = last;
    return;
  }
  std::vector<int> missing(count), ready;
  std::vector<std::vector<int>> then(count);
  for (int i = 0; i < count; ++i) {
    missing[i] = static_cast<int>(nodes[i].after.size());
    for (int before : nodes[i].after) then[before].push_back(i);
    if (!missing[i]) ready.push_back(i);
  }
  while (!ready.empty()) {
    const auto random = Adversary::number(
        {static_cast<uint64_t>(id), replay, ready.size(), static_cast<uint64_t>(ready.back())});
    const auto next = ready.begin() + static_cast<long>(random % ready.size());
    const int node = *next;
    ready.erase(next);
    run_node(node);
    for (int after : then[node])
      if (--missing[after] == 0) ready.push_back(after);
  }
  on.modelled = last;
}

bool Capture::take(Stream& stream, Task& task) {
  std::lock_guard lock(graph->mutex);
  if (ended) return false;
  append(*this, stream, std::move(task));
  return true;
}

bool Update::take(Stream&, Task& task) {
  std::lock_guard lock(mutex);
  if (ended || task.kind != Kind::op) return false;
  tasks.push_back(std::move(task));
  return true;
}

bool capture_record(Stream& stream, Event& event) {
  std::lock_guard lock(event.mutex);
  event.captured.reset();
  const auto capture = capture_of(stream);
  if (!capture) return false;
  std::lock_guard nodes_lock(capture->graph->mutex);
  if (capture->ended) return false;
  const auto& of = capture->streams.at(stream.id);
  // Include the dependencies of the stream's next node.
  if (!of.joined.empty()) append(*capture, stream, Task{"join", [] {}, Kind::wait});
  event.captured = capture;
  event.node = of.last;
  return true;
}

bool capture_wait(Stream& stream, Event& event) {
  std::lock_guard lock(event.mutex);
  const auto recorded = event.captured.lock();
  const auto capture = capture_of(stream);
  if (!recorded) {
    if (!capture) return false;
    if (!event.mark) return true;  // never recorded: nothing to wait for
    std::lock_guard nodes_lock(capture->graph->mutex);
    invalidate(*capture->graph,
        "a captured stream waits for an event that was recorded outside the capture");
    throw Error(kCaptureDependency, capture->graph->invalid);
  }
  check(
      !capture || capture == recorded, kCaptureDependency, "the event belongs to another capture");
  std::lock_guard nodes_lock(recorded->graph->mutex);
  check(!recorded->ended, kCaptureDependency, "the event was recorded in a capture that has ended");
  enter(stream, recorded, kNoResource);
  recorded->streams.at(stream.id).joined.push_back(event.node);
  return true;
}

// The forbidden calls: CANN's API reference, "aclmdlRICaptureBegin" (aclrtMemset, aclrtMemcpy,
// aclrtMemcpy2d, and asynchronous copies of host memory that is not pinned) and
// "aclmdlRICaptureMode".
void check_capture_mode(const char* call) {
  auto& captures = process.part<Captures>();
  std::lock_guard lock(captures.mutex);
  if (captures.active.empty() || thread_mode == CaptureMode::relaxed) return;
  for (auto* capture : captures.active) {
    const bool global = capture->mode == CaptureMode::global;
    if (!global &&
        (capture->mode == CaptureMode::relaxed || capture->thread != std::this_thread::get_id()))
      continue;
    std::lock_guard nodes_lock(capture->graph->mutex);
    invalidate(*capture->graph, text(call, " was called during the capture"));
    raise(kCaptureMode,
        {"not allowed while a stream is captured in the mode ", global ? "global" : "thread_local",
            "; capture in the mode relaxed, or make the call before"});
  }
}

CaptureMode exchange_capture_mode(CaptureMode mode) { return std::exchange(thread_mode, mode); }

void begin_capture(void* handle, const std::shared_ptr<Graph>& graph, int32_t mode) {
  auto stream = stream_at(handle);
  check(handle != nullptr, kInvalidParam, "the default stream cannot be captured");
  check(mode >= 0 && mode <= 2, kInvalidParam, "capture mode ", mode,
      "; supported: 0 global, 1 thread_local and 2 relaxed");
  const auto capture = std::make_shared<Capture>(graph, static_cast<CaptureMode>(mode), stream->id);
  {
    std::lock_guard lock(graph->mutex);
    check(!graph->capturing, kStreamCaptured, "the graph is being captured already");
    enter(*stream, capture, kNoStream);
    graph->capturing = true;
  }
  auto& captures = process.part<Captures>();
  std::lock_guard lock(captures.mutex);
  captures.active.insert(capture.get());
}

std::optional<std::string> end_capture(Capture& capture) {
  {
    auto& captures = process.part<Captures>();
    std::lock_guard lock(captures.mutex);
    captures.active.erase(&capture);
  }
  auto& graph = *capture.graph;
  std::lock_guard lock(graph.mutex);
  if (std::exchange(capture.ended, true)) return std::nullopt;
  // Every captured stream must be joined to the origin stream.
  std::set<int> reached;
  auto queue = capture.streams[capture.origin].joined;
  queue.push_back(capture.streams[capture.origin].last);
  while (!queue.empty()) {
    const int node = queue.back();
    queue.pop_back();
    if (node < 0 || !reached.insert(node).second) continue;
    for (int before : graph.nodes[node].after) queue.push_back(before);
  }
  for (const auto& [id, of] : capture.streams) {
    of.stream->capture.clear();
    if (of.last >= 0 && !reached.count(of.last))
      invalidate(graph,
          text("stream ", id,
              " took part in the capture and was not joined to its first stream by an event"));
    if (of.group) invalidate(graph, "a task group was begun and not ended");
  }
  capture.streams.clear();
  graph.capturing = false;
  return graph.invalid;
}

}  // namespace emu
