// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "trace.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "device.h"
#include "process.h"

namespace emu {
namespace {

thread_local int depth = 0;  // nesting depth: nodes of a graph run within its task

// Appends complete lines: several processes write to the same file.
struct Trace {
  int file;  // -1: closed
  std::mutex mutex;
  std::string buffer;
  std::set<std::string> named;
  Clock::time_point flushed = Clock::now();

  void add(const std::string& line) {
    std::lock_guard lock(mutex);
    if (file < 0) return;
    buffer += line;
    if (buffer.size() > 65536 || Clock::now() - flushed > std::chrono::milliseconds(500)) flush();
  }
  void flush() {
    for (size_t at = 0; at < buffer.size();) {
      const auto written = write(file, buffer.data() + at, buffer.size() - at);
      if (written <= 0) break;
      at += static_cast<size_t>(written);
    }
    buffer.clear();
    flushed = Clock::now();
  }
};

// The file of ASCEND_EMULATOR_TRACE, null if there is none.
Trace* open_whole_trace() {
  const char* path = std::getenv("ASCEND_EMULATOR_TRACE");
  if (!path || !*path) return static_cast<Trace*>(nullptr);
  const int made_now = open(path, O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (made_now >= 0 && write(made_now, "[\n", 2) != 2)
    fprintf(stderr, "ascend-emulator: cannot write the trace to %s\n", path);
  const int file = made_now >= 0 ? made_now : open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) {
    fprintf(stderr, "ascend-emulator: cannot write the trace to %s\n", path);
    return static_cast<Trace*>(nullptr);
  }
  auto* made = new Trace;
  made->file = file;
  return made;
}

struct Tracing {
  std::atomic<bool> modelling{false};
  std::atomic<Trace*> profile{nullptr};  // never deleted: a task may be about to write
  Trace* const whole = open_whole_trace();
};
Tracing& tracing() { return process.part<Tracing>(); }

double microseconds(Clock::time_point time) {
  return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
}

const char* name_of(Kind kind) {
  const char* const names[] = {"operator", "copy", "record", "wait", "host", "collective", "graph"};
  return names[static_cast<int>(kind)];
}

bool traced() { return tracing().whole || tracing().profile; }

void add(const std::string& line) {
  for (Trace* trace : {tracing().whole, tracing().profile.load()})
    if (trace) trace->add(line);
}

void name_thread(Trace* trace, const std::string& id, const std::string& name) {
  if (!trace) return;
  {
    std::lock_guard lock(trace->mutex);
    if (!trace->named.insert(id).second) return;
  }
  trace->add(text("{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": ", getpid(),
      ", \"tid\": ", id, ", \"args\": {\"name\": \"", name, "\"}},\n"));
}
void name_thread(const std::string& id, const std::string& name) {
  for (Trace* trace : {tracing().whole, tracing().profile.load()}) name_thread(trace, id, name);
}

std::string event(const std::string& name, const char* category, const std::string& tid,
    Clock::time_point start, Clock::time_point end, const std::string& arguments) {
  std::ostringstream out;
  out.precision(3);
  out << std::fixed << "{\"name\": \"" << name << "\", \"cat\": \"" << category
      << "\", \"ph\": \"X\", \"pid\": " << getpid() << ", \"tid\": " << tid
      << ", \"ts\": " << microseconds(start)
      << ", \"dur\": " << microseconds(end) - microseconds(start) << ", \"args\": {" << arguments
      << "}},\n";
  return out.str();
}

}  // namespace

bool trace_enabled() { return tracing().modelling || traced(); }

double modelled_seconds(Kind kind, const Work& w, bool in_graph) {
  const auto& c = chip();
  const double launch = in_graph ? c.graph_launch : c.launch;
  switch (kind) {
    case Kind::record:
    case Kind::wait:
    case Kind::host:
    case Kind::graph: return 0;
    case Kind::copy: return launch + std::max(w.bytes / c.bandwidth, w.link / c.host_bandwidth);
    case Kind::collective: return launch + w.link / c.link_bandwidth;
    case Kind::op: break;
  }
  const double throughput = w.item == 0   ? c.vector_flops
                            : w.item == 1 ? c.cube_flops * 2
                            : w.item == 2 ? c.cube_flops
                                          : c.cube_flops / 4;
  return launch + std::max(w.flops / throughput, w.bytes / c.bandwidth);
}

TaskTrace::TaskTrace(Queue& stream, const Task& task)
    : on_(trace_enabled()), stream_(stream), task_(task), scope_(on_ ? &counters_ : nullptr) {
  if (!on_) return;
  ++depth;
  start_ = Clock::now();
}

TaskTrace::~TaskTrace() {
  if (!on_) return;
  const bool in_graph = --depth > 0;
  auto work = task_.work;
  work.bytes += counters_.bytes;
  if (counters_.flops > 0) work.flops = counters_.flops, work.item = counters_.item;
  const double seconds = modelled_seconds(task_.kind, work, in_graph);
  stream_.modelled += seconds;
  if (!traced()) return;
  const auto id = std::to_string(stream_.id);
  name_thread(id, text("NPU ", stream_.device, " stream ", stream_.id));
  std::ostringstream arguments;
  arguments << "\"npu\": " << stream_.device << ", \"stream\": " << stream_.id
            << ", \"bytes\": " << static_cast<int64_t>(work.bytes + work.link)
            << ", \"flops\": " << static_cast<int64_t>(work.flops)
            << ", \"estimated_us\": " << seconds * 1e6;
  if (work.link > 0) arguments << ", \"link\": " << static_cast<int64_t>(work.link);
  if (work.called != Clock::time_point{})
    arguments << ", \"called\": " << static_cast<int64_t>(microseconds(work.called) * 1000)
              << "e-3";
  if (!work.shapes.empty()) arguments << ", \"shapes\": \"" << work.shapes << '"';
  add(event(task_.name, name_of(task_.kind), id, start_, Clock::now(), arguments.str()));
}

HostTrace::HostTrace(const char* name, double copied)
    : name_(name), copied_(copied), on_(traced()) {
  if (on_) start_ = Clock::now();
}

HostTrace::~HostTrace() {
  if (!on_) return;
  const auto thread = std::to_string(1000000 + syscall(SYS_gettid));
  name_thread(thread, "host " + thread.substr(1));
  const auto bytes = copied_ > 0 ? text("\"bytes\": ", static_cast<int64_t>(copied_)) : "";
  add(event(name_, copied_ > 0 ? "copy" : "synchronize", thread, start_, Clock::now(), bytes));
}

void flush_trace() {
  for (Trace* trace : {tracing().whole, tracing().profile.load()}) {
    if (!trace) continue;
    std::lock_guard lock(trace->mutex);
    trace->flush();
  }
}

void start_profile(const std::string& path) {
  const int file = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
  check(file >= 0, kInvalidParam, "cannot write the profile to ", path);
  auto* made = new Trace;
  made->file = file;
  made->add("[\n");
  tracing().profile = made;
}

void stop_profile() {
  Trace* const ended = tracing().profile.exchange(nullptr);
  if (!ended) return;
  std::lock_guard lock(ended->mutex);
  ended->flush();
  close(std::exchange(ended->file, -1));
}

}  // namespace emu

// For ascend_emulator.tracing: writes buffered events.
EXPORT void ascend_emulator_flush_trace() { emu::flush_trace(); }
// Enables the model.
EXPORT void ascend_emulator_model(int on) { emu::tracing().modelling = on != 0; }
