// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// aclmdlRI entry points. Signatures: torch_npu/csrc/core/npu/interface/AclInterface.cpp
// (Ascend/pytorch, BSD); behaviour: CANN's public API reference ("aclmdlRICaptureBegin" and
// following) and torch_npu's NPUGraph.cpp.
#include <map>

#include "core/entry_point.h"
#include "core/graph.h"

using namespace emu;

namespace {

struct Graphs {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Graph>> graphs;
  std::map<void*, std::shared_ptr<Group>> groups;
  std::map<void*, std::shared_ptr<Condition>> conditions;
  int next = 0;
};
Graphs& all() { return process.part<Graphs>(); }

std::shared_ptr<Graph> new_graph(int device) {
  std::lock_guard lock(all().mutex);
  auto graph = std::make_shared<Graph>(device, all().next++);
  all().graphs[graph.get()] = graph;
  return graph;
}

template <class Map> auto found(Map& map, void* handle, const char* what) {
  std::lock_guard lock(all().mutex);
  const auto at = map.find(handle);
  check(at != map.end(), kInvalidParam, handle, " is no ", what, ", or it was destroyed");
  return at->second;
}

// The graph cannot be used any more: nor can its task groups, conditions and branches.
void forget(const std::shared_ptr<Graph>& graph) {
  for (const auto& branch : graph->branches) forget(branch);
  std::lock_guard lock(all().mutex);
  std::erase_if(all().groups, [&](const auto& each) { return each.second->graph.lock() == graph; });
  for (const auto& condition : graph->conditions) all().conditions.erase(condition.get());
  all().graphs.erase(graph.get());
}

// Branches run on the stream of the replay.
void run_branch(const std::shared_ptr<Condition>& condition, int32_t type,
    const std::vector<std::shared_ptr<Graph>>& branches) {
  auto& on = running_stream();
  const auto value = [&] {
    return *static_cast<const volatile uint64_t*>(to_kernel(condition->address));
  };
  if (type == 0) {  // if, with optional else
    if (value()) branches[0]->run(on);
    else if (branches.size() > 1) branches[1]->run(on);
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
    begin_capture(stream, graph, mode);
  } catch (...) {
    forget(graph);
    throw;
  }
})
ACL_API(computed, aclmdlRICaptureToModelRIBegin, (void* stream, void* graph, int32_t mode),
    { begin_capture(stream, found(all().graphs, graph, "graph"), mode); })

ACL_API(computed, aclmdlRICaptureGetInfo, (void* stream, int32_t* status, void** graph), {
  // 0 none, 1 active, 2 invalidated.
  const auto capture = capture_of(stream_of(stream));
  if (graph) *graph = capture ? capture->graph.get() : nullptr;
  if (!status) return;
  *status = 0;
  if (!capture) return;
  std::lock_guard lock(capture->graph->mutex);
  *status = capture->graph->invalid.empty() ? 1 : 2;
})

ACL_API(computed, aclmdlRICaptureEnd, (void* handle, void** graph), {
  auto stream = stream_at(handle);
  const auto capture = capture_of(*stream);
  if (graph) *graph = nullptr;
  check(capture != nullptr, kNotCaptured, "the stream is not being captured");
  check(capture->origin == stream->id, kCaptureUnmatched, "the capture began on another stream");
  check(capture->mode == CaptureMode::relaxed || capture->thread == std::this_thread::get_id(),
      kCaptureThread, "the capture began in another thread");
  const auto invalid = end_capture(*capture);
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
  *mode = static_cast<int32_t>(exchange_capture_mode(static_cast<CaptureMode>(*mode)));
})

ACL_API(computed, aclmdlRIExecuteAsync, (void* handle, void* stream), {
  const auto graph = found(all().graphs, handle, "graph");
  auto on = stream_at(stream);
  check(!on->capture, kStreamCaptured, "a graph cannot be run on a stream that is being captured");
  check(on->device == graph->device, kInvalidParam, "the graph is of NPU ", graph->device,
      ", the stream of NPU ", on->device);
  {
    std::lock_guard lock(graph->mutex);
    check(!graph->capturing, kStreamCaptured, "the graph is being captured");
  }
  Task task{"aclmdlRIExecuteAsync", [graph, on = on.get()] { graph->run(*on); }, Kind::graph};
  task.blocks = graph->blocks();
  if (host_access::races()) task.pinned = graph->pinned();
  on->submit(std::move(task));
})
ACL_API(computed, aclmdlRIDestroy, (void* handle), {
  forget(found(all().graphs, handle, "graph"));  // a running replay keeps it alive
})
ACL_API(answers, aclmdlRIGetId, (void* handle, uint32_t* id),
    { *id = static_cast<uint32_t>(found(all().graphs, handle, "graph")->id); })

// Task groups: the nodes captured between begin and end get a handle. In an update, the same
// operators are called again on another stream; they replace the nodes in that order and are not
// executed.
ACL_API(computed, aclmdlRICaptureTaskGrpBegin, (void* stream), {
  auto& on = stream_of(stream);
  const auto capture = capture_of(on);
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
  const auto capture = capture_of(on);
  std::shared_ptr<Group> group;
  if (capture) {
    std::lock_guard lock(capture->graph->mutex);
    if (!capture->ended) group.swap(capture->streams.at(on.id).group);
  }
  check(group != nullptr, kNotCaptured, "no task group is open on the stream");
  std::lock_guard lock(all().mutex);
  all().groups[group.get()] = group;
  *handle = group.get();
})
ACL_API(computed, aclmdlRICaptureTaskUpdateBegin, (void* stream, void* handle), {
  auto& on = stream_of(stream);
  check(!on.capture, kStreamCaptured, "an update wants a stream that is not being captured");
  auto group = found(all().groups, handle, "task group");
  check(!group->graph.expired(), kInvalidParam, "the graph of this task group was destroyed");
  check(on.update.set(std::make_shared<Update>(std::move(group))), kInvalidParam,
      "an update is open on this stream already");
})
ACL_API(computed, aclmdlRICaptureTaskUpdateEnd, (void* stream), {
  auto& on = stream_of(stream);
  const auto update = std::static_pointer_cast<Update>(on.update.clear());
  check(update != nullptr, kInvalidParam, "no update is open on this stream");
  {
    std::lock_guard lock(update->mutex);
    update->ended = true;
  }
  const auto& nodes = update->group->nodes;
  check(update->tasks.size() == nodes.size(), kInvalidParam, "the task group has ", nodes.size(),
      " operators, its update ", update->tasks.size());
  on.submit_brief("aclmdlRICaptureTaskUpdate", Kind::host, [update] {
    const auto& [group, tasks] = std::tie(update->group, update->tasks);
    const auto graph = group->graph.lock();
    check(graph != nullptr, kInvalidParam, "the graph was destroyed before its update");
    std::lock_guard lock(graph->mutex);
    for (size_t i = 0; i < tasks.size(); ++i) {
      auto& old = graph->nodes[group->nodes[i]].task;
      check(std::string_view(old->name) == tasks[i].name, kInvalidParam, "node ", group->nodes[i],
          " is ", old->name, ", its update ", tasks[i].name);
      old = std::make_shared<const Task>(tasks[i]);
    }
  });
})

// Conditional nodes.
ACL_API(computed, aclmdlRICondHandleCreate,
    (void* handle, uint32_t initial, uint32_t flags, void** out), {
      const auto graph = found(all().graphs, handle, "graph");
      auto condition = std::make_shared<Condition>();
      condition->address = static_cast<uint64_t*>(device(graph->device).allocate(sizeof(uint64_t)));
      condition->initial = initial;
      condition->assign = flags == 1;
      std::scoped_lock lock(graph->mutex, all().mutex);
      graph->conditions.push_back(condition);
      all().conditions[condition.get()] = condition;
      *out = condition.get();
    })
ACL_API(computed, aclmdlRICondHandleGetCondPtr, (void* handle, uint64_t** address),
    { *address = found(all().conditions, handle, "condition")->address; })
ACL_API(computed, aclmdlRIAddCondTask, (CondTaskParams params, void* handle, uint32_t), {
  auto& stream = stream_of(handle);
  const auto condition = found(all().conditions, params.handle, "condition");
  const auto capture = capture_of(stream);
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
  const auto graph = found(all().graphs, handle, "graph");
  std::lock_guard lock(graph->mutex);
  for (size_t i = 0; i < graph->nodes.size(); ++i)
    printf("graph %d node %zu: %s, stream %d\n", graph->id, i, graph->nodes[i].task->name,
        graph->nodes[i].stream);
})
ACL_API(computed, aclmdlRIDebugJsonPrint, (void* handle, const char* path, uint32_t), {
  const auto graph = found(all().graphs, handle, "graph");
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

namespace emu {
void end_captures(int device) {
  for (const auto& stream : streams_of(device))
    if (const auto capture = capture_of(*stream); capture && end_capture(*capture))
      forget(capture->graph);
}
}  // namespace emu
