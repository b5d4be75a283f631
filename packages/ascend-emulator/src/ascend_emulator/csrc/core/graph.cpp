// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "graph.h"

#include <algorithm>
#include <set>
#include <utility>

#include "adversary.h"
#include "trace.h"

namespace emu {
namespace {

// Active captures, for calls that a capture forbids on other streams and threads too.
std::mutex active_captures_mutex;
std::set<Capture*> active_captures;
thread_local CaptureMode thread_mode = CaptureMode::global;

// Open task-group update of a stream, with its tasks.
struct Update {
  std::shared_ptr<Group> group;
  std::vector<Task> tasks;
};
std::mutex update_mutex;
std::map<int, Update> updates;  // by the stream's id
std::atomic<int> open_updates{0};

// The functions below with a Capture are called with its graph's mutex locked.
void invalidate(Graph& graph, const std::string& why) {
  if (graph.invalid.empty()) graph.invalid = why;
}

void enter(Stream& stream, const std::shared_ptr<Capture>& capture, Status status) {
  if (capture->streams.count(stream.id)) return;
  reserve_streams(capture->graph->device, 1, status);
  ++capture->graph->streams;
  check(stream.enter(capture), kStreamCaptured, "the stream is being captured already");
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

void Graph::run(Stream& on) {
  const uint64_t replay = replays++;
  for (const auto& condition : conditions)
    if (condition->assign)
      *static_cast<uint64_t*>(to_kernel(condition->address)) = condition->initial;
  const auto run_node = [&](int node) {
    check_not_aborted();
    std::shared_ptr<const Task> task;
    {
      std::lock_guard lock(mutex);
      task = nodes[node].task;
    }
    try {
      TaskTrace observed(on, *task);
      task->run();
    } catch (const std::exception& e) {
      const auto error = error_of(e);
      throw Error(
          error.status, text(task->name, " (node ", node, " of graph ", id, "): ", error.what()));
    }
  };
  const int count = static_cast<int>(nodes.size());
  if (!Adversary::on()) {
    for (int i = 0; i < count; ++i) run_node(i);  // a node depends on earlier ones
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
}

bool capture_task(Stream& stream, Task& task) {
  const auto capture = stream.capture();
  if (!capture) return false;
  std::lock_guard lock(capture->graph->mutex);
  if (capture->ended) return false;
  append(*capture, stream, std::move(task));
  return true;
}

bool capture_record(Stream& stream, Event& event) {
  std::lock_guard lock(event.mutex);
  event.captured.reset();
  const auto capture = stream.capture();
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
  const auto capture = stream.capture();
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

// The capture remains valid (torch_npu's test_aclgraph_rng_state.py,
// test_graph_rng_after_failed_capture).
void check_not_captured(const Stream& stream) {
  check(!stream.captured(), kStreamCaptured,
      "the stream is being captured, and does not run until the graph is replayed");
}

// The forbidden calls: CANN's API reference, "aclmdlRICaptureBegin" (aclrtMemset, aclrtMemcpy,
// aclrtMemcpy2d, and asynchronous copies of host memory that is not pinned) and
// "aclmdlRICaptureMode".
void check_capture_mode(const char* call) {
  std::lock_guard lock(active_captures_mutex);
  if (active_captures.empty() || thread_mode == CaptureMode::relaxed) return;
  for (auto* capture : active_captures) {
    const bool global = capture->mode == CaptureMode::global;
    if (!global &&
        (capture->mode == CaptureMode::relaxed || capture->thread != std::this_thread::get_id()))
      continue;
    std::lock_guard nodes_lock(capture->graph->mutex);
    invalidate(*capture->graph, text(call, " was called during the capture"));
    throw Error(kCaptureMode, text("not allowed while a stream is captured in the mode ",
                                  global ? "global" : "thread_local",
                                  "; capture in the mode relaxed, or make the call before"));
  }
}

}  // namespace emu

// aclmdlRI entry points. Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp
// (Ascend/pytorch, BSD); behaviour: CANN's public API reference ("aclmdlRICaptureBegin" and
// following) and torch_npu's NPUGraph.cpp.
#include "registry.h"

using namespace emu;

namespace {

std::mutex graphs_mutex;
std::map<void*, std::shared_ptr<Graph>> graphs;
std::map<void*, std::shared_ptr<Group>> groups;
std::map<void*, std::shared_ptr<Condition>> conditions;
int next_graph = 0;

std::shared_ptr<Graph> new_graph(int device) {
  std::lock_guard lock(graphs_mutex);
  auto graph = std::make_shared<Graph>(device, next_graph++);
  graphs[graph.get()] = graph;
  return graph;
}

template <class Map>
auto found(Map& map, void* handle, const char* what) {
  std::lock_guard lock(graphs_mutex);
  const auto at = map.find(handle);
  check(at != map.end(), kInvalidParam, handle, " is no ", what, ", or it was destroyed");
  return at->second;
}

void begin(void* handle, const std::shared_ptr<Graph>& graph, int32_t mode) {
  auto stream = stream_at(handle);
  check(handle != nullptr, kInvalidParam, "the default stream cannot be captured");
  check(mode >= 0 && mode <= 2, kInvalidParam, "capture mode ", mode,
      "; supported: 0 global, 1 thread_local and 2 relaxed");
  std::shared_ptr<Capture> capture(
      new Capture{graph, static_cast<CaptureMode>(mode), std::this_thread::get_id(), stream->id});
  {
    std::lock_guard lock(graph->mutex);
    check(!graph->capturing, kStreamCaptured, "the graph is being captured already");
    enter(*stream, capture, kNoStream);
    graph->capturing = true;
  }
  std::lock_guard lock(active_captures_mutex);
  active_captures.insert(capture.get());
}

// Ends a capture and releases its streams; returns why it is invalid, nothing if it has ended
// before.
std::optional<std::string> ended(Capture& capture) {
  {
    std::lock_guard lock(active_captures_mutex);
    active_captures.erase(&capture);
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
    of.stream->leave_capture();
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

// The graph cannot be used any more: nor can its task groups, conditions and branches.
void forget(const std::shared_ptr<Graph>& graph) {
  for (const auto& branch : graph->branches) forget(branch);
  std::lock_guard lock(graphs_mutex);
  std::erase_if(groups, [&](const auto& each) { return each.second->graph.lock() == graph; });
  for (const auto& condition : graph->conditions) conditions.erase(condition.get());
  graphs.erase(graph.get());
}

// Branches run on the stream of the replay.
void run_branch(const std::shared_ptr<Condition>& condition, int32_t type,
    const std::vector<std::shared_ptr<Graph>>& branches) {
  auto& on = running_stream();
  const auto value = [&] {
    return *static_cast<const volatile uint64_t*>(to_kernel(condition->address));
  };
  if (type == 0) {  // if, with optional else
    if (value())
      branches[0]->run(on);
    else if (branches.size() > 1)
      branches[1]->run(on);
  } else if (type == 1) {  // while
    while (value()) {
      check_not_aborted();
      branches[0]->run(on);
    }
  } else if (const auto chosen = value(); chosen < branches.size()) {  // switch
    branches[chosen]->run(on);
  }
}

struct CondTaskParams {
  void* handle;
  int32_t type;
  uint32_t size;
  void** graphs;
};

}  // namespace

ACL_API(computed, aclmdlRICaptureBegin, (void* stream, int32_t mode), {
  const auto graph = new_graph(stream_of(stream).device);
  try {
    begin(stream, graph, mode);
  } catch (...) {
    forget(graph);
    throw;
  }
})
ACL_API(computed, aclmdlRICaptureToModelRIBegin, (void* stream, void* graph, int32_t mode),
    { begin(stream, found(graphs, graph, "graph"), mode); })

ACL_API(computed, aclmdlRICaptureGetInfo, (void* stream, int32_t* status, void** graph), {
  // 0 none, 1 active, 2 invalidated.
  const auto capture = stream_of(stream).capture();
  if (graph) *graph = capture ? capture->graph.get() : nullptr;
  if (!status) return;
  *status = 0;
  if (!capture) return;
  std::lock_guard lock(capture->graph->mutex);
  *status = capture->graph->invalid.empty() ? 1 : 2;
})

ACL_API(computed, aclmdlRICaptureEnd, (void* handle, void** graph), {
  auto stream = stream_at(handle);
  const auto capture = stream->capture();
  if (graph) *graph = nullptr;
  check(capture != nullptr, kNotCaptured, "the stream is not being captured");
  check(capture->origin == stream->id, kCaptureUnmatched, "the capture began on another stream");
  check(capture->mode == CaptureMode::relaxed || capture->thread == std::this_thread::get_id(),
      kCaptureThread, "the capture began in another thread");
  const auto invalid = ended(*capture);
  check(invalid.has_value(), kNotCaptured, "the stream is not being captured");
  if (invalid->empty()) {
    if (graph) *graph = capture->graph.get();
    return;
  }
  forget(capture->graph);
  throw Error(kCaptureInvalidated, "the capture is invalid: " + *invalid);
})

ACL_API(computed, aclmdlRICaptureThreadExchangeMode, (int32_t* mode), {
  check(mode && *mode >= 0 && *mode <= 2, kInvalidParam, "a capture mode is 0, 1 or 2");
  const auto before = static_cast<int32_t>(thread_mode);
  thread_mode = static_cast<CaptureMode>(*mode);
  *mode = before;
})

ACL_API(computed, aclmdlRIExecuteAsync, (void* handle, void* stream), {
  const auto graph = found(graphs, handle, "graph");
  auto on = stream_at(stream);
  check(
      !on->captured(), kStreamCaptured, "a graph cannot be run on a stream that is being captured");
  check(on->device == graph->device, kInvalidParam, "the graph is of NPU ", graph->device,
      ", the stream of NPU ", on->device);
  {
    std::lock_guard lock(graph->mutex);
    check(!graph->capturing, kStreamCaptured, "the graph is being captured");
  }
  Task task{"aclmdlRIExecuteAsync", [graph, on = on.get()] { graph->run(*on); }, Kind::graph};
  task.blocks = graph->blocks();
  on->submit(std::move(task));
})
ACL_API(computed, aclmdlRIDestroy, (void* handle), {
  forget(found(graphs, handle, "graph"));  // a running replay keeps it alive
})
ACL_API(answers, aclmdlRIGetId, (void* handle, uint32_t* id),
    { *id = static_cast<uint32_t>(found(graphs, handle, "graph")->id); })

// Task groups: the nodes captured between begin and end get a handle. In an update, the same
// operators are called again on another stream; they replace the nodes in that order and are not
// executed.
ACL_API(computed, aclmdlRICaptureTaskGrpBegin, (void* stream), {
  auto& on = stream_of(stream);
  const auto capture = on.capture();
  check(capture != nullptr, kNotCaptured, "the stream is not being captured");
  std::lock_guard lock(capture->graph->mutex);
  check(!capture->ended, kNotCaptured, "the stream is not being captured");
  auto& group = capture->streams.at(on.id).group;
  check(!group, kInvalidParam, "a task group is open already");
  group = std::make_shared<Group>();
  group->graph = capture->graph;
})
ACL_API(computed, aclmdlRICaptureTaskGrpEnd, (void* stream, void** handle), {
  auto& on = stream_of(stream);
  const auto capture = on.capture();
  std::shared_ptr<Group> group;
  if (capture) {
    std::lock_guard lock(capture->graph->mutex);
    if (!capture->ended) group.swap(capture->streams.at(on.id).group);
  }
  check(group != nullptr, kNotCaptured, "no task group is open on the stream");
  std::lock_guard lock(graphs_mutex);
  groups[group.get()] = group;
  *handle = group.get();
})
ACL_API(computed, aclmdlRICaptureTaskUpdateBegin, (void* stream, void* handle), {
  auto& on = stream_of(stream);
  check(!on.captured(), kStreamCaptured, "an update wants a stream that is not being captured");
  auto group = found(groups, handle, "task group");
  check(!group->graph.expired(), kInvalidParam, "the graph of this task group was destroyed");
  std::lock_guard lock(update_mutex);
  check(updates.emplace(on.id, Update{std::move(group), {}}).second, kInvalidParam,
      "an update is open on this stream already");
  ++open_updates;
})
ACL_API(computed, aclmdlRICaptureTaskUpdateEnd, (void* stream), {
  auto& on = stream_of(stream);
  Update update;
  {
    std::lock_guard lock(update_mutex);
    const auto at = updates.find(on.id);
    check(at != updates.end(), kInvalidParam, "no update is open on this stream");
    update = std::move(at->second);
    updates.erase(at);
    --open_updates;
  }
  const auto count = update.tasks.size();
  check(count == update.group->nodes.size(), kInvalidParam, "the task group has ",
      update.group->nodes.size(), " operators, its update ", count);
  on.submit_brief("aclmdlRICaptureTaskUpdate", Kind::host, [update = std::move(update)] {
    const auto graph = update.group->graph.lock();
    check(graph != nullptr, kInvalidParam, "the graph was destroyed before its update");
    std::lock_guard lock(graph->mutex);
    for (size_t i = 0; i < update.tasks.size(); ++i) {
      auto& old = graph->nodes[update.group->nodes[i]].task;
      check(std::string_view(old->name) == update.tasks[i].name, kInvalidParam, "node ",
          update.group->nodes[i], " is ", old->name, ", its update ", update.tasks[i].name);
      old = std::make_shared<const Task>(update.tasks[i]);
    }
  });
})

namespace emu {
bool add_to_update(Stream& stream, Task& task) {
  if (open_updates == 0 || task.kind != Kind::op) return false;
  std::lock_guard lock(update_mutex);
  const auto at = updates.find(stream.id);
  if (at == updates.end()) return false;
  at->second.tasks.push_back(std::move(task));
  return true;
}

void end_update(const Stream& stream) {
  std::lock_guard lock(update_mutex);
  open_updates -= static_cast<int>(updates.erase(stream.id));
}

void end_captures(int device) {
  for (const auto& stream : streams_of(device))
    if (const auto capture = stream->capture(); capture && ended(*capture)) forget(capture->graph);
}
}  // namespace emu

// Conditional nodes.
ACL_API(computed, aclmdlRICondHandleCreate,
    (void* handle, uint32_t initial, uint32_t flags, void** out), {
      const auto graph = found(graphs, handle, "graph");
      auto condition = std::make_shared<Condition>();
      condition->address = static_cast<uint64_t*>(device(graph->device).allocate(sizeof(uint64_t)));
      condition->initial = initial;
      condition->assign = flags == 1;
      std::scoped_lock lock(graph->mutex, graphs_mutex);
      graph->conditions.push_back(condition);
      conditions[condition.get()] = condition;
      *out = condition.get();
    })
ACL_API(computed, aclmdlRICondHandleGetCondPtr, (void* handle, uint64_t** address),
    { *address = found(conditions, handle, "condition")->address; })
ACL_API(computed, aclmdlRIAddCondTask, (CondTaskParams params, void* handle, uint32_t), {
  auto& stream = stream_of(handle);
  const auto condition = found(conditions, params.handle, "condition");
  const auto capture = stream.capture();
  check(capture != nullptr, kNotCaptured, "the stream is not being captured");
  check(params.type >= 0 && params.type <= 2, kInvalidParam, "condition type ", params.type,
      "; supported: 0 if, 1 while and 2 switch");
  const uint32_t most[] = {2, 1, UINT32_MAX};
  check(params.size >= 1 && params.size <= most[params.type], kInvalidParam, params.size,
      " branches for condition type ", params.type);
  std::vector<std::shared_ptr<Graph>> branches;
  for (uint32_t i = 0; i < params.size; ++i) {
    branches.push_back(new_graph(stream.device));
    params.graphs[i] = branches.back().get();
    std::lock_guard lock(capture->graph->mutex);
    capture->graph->branches.push_back(branches.back());
  }
  Task task{"aclmdlRIAddCondTask",
      [condition, type = params.type, branches] { run_branch(condition, type, branches); },
      Kind::graph};
  stream.submit(std::move(task));
})

// Prints the graph, to standard output or as JSON in the trace event format.
ACL_API(computed, aclmdlRIDebugPrint, (void* handle), {
  const auto graph = found(graphs, handle, "graph");
  std::lock_guard lock(graph->mutex);
  for (size_t i = 0; i < graph->nodes.size(); ++i)
    printf("graph %d node %zu: %s, stream %d\n", graph->id, i, graph->nodes[i].task->name,
        graph->nodes[i].stream);
})
ACL_API(computed, aclmdlRIDebugJsonPrint, (void* handle, const char* path, uint32_t), {
  const auto graph = found(graphs, handle, "graph");
  FILE* file = path ? std::fopen(path, "w") : nullptr;
  check(file != nullptr, kInvalidParam, "cannot write to ", path ? path : "null");
  std::lock_guard lock(graph->mutex);
  std::fputs("[", file);
  for (size_t i = 0; i < graph->nodes.size(); ++i)
    std::fprintf(file,
        "%s\n{\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"graph %d\", \"tid\": \"stream %d\", "
        "\"ts\": %zu, \"dur\": 1}",
        i ? "," : "", graph->nodes[i].task->name, graph->id, graph->nodes[i].stream, i);
  std::fputs("\n]\n", file);
  std::fclose(file);
})
