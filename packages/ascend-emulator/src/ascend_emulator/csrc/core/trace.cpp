// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "trace.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "device.h"
#include "laws.h"
#include "process.h"

namespace emu {
namespace {

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

void report_modelled_time();

struct Tracing {
  // ASCEND_EMULATOR_TIME: the modelled clock is shown.
  const bool shown = std::getenv("ASCEND_EMULATOR_TIME") != nullptr;
  std::atomic<bool> modelling{shown};
  std::atomic<double> host{0};           // seconds of the host on the modelled clock
  std::atomic<Trace*> profile{nullptr};  // never deleted: a task may be about to write
  Trace* const whole = open_whole_trace();
  std::mutex mutex;  // guards the next ones
  uint64_t launches = 0;
  double seconds = 0;
  std::map<std::string, uint64_t> lawless;  // launches by operator
  std::set<std::string> compiled;           // operators and shapes

  Tracing();
};
Tracing& tracing() { return process.part<Tracing>(); }

void report_modelled_time() {
  auto& all = tracing();
  std::lock_guard lock(all.mutex);
  if (process.forked() || !all.launches) return;
  uint64_t count = 0;
  std::string names;
  for (const auto& [name, launches] : all.lawless) {
    count += launches;
    names += text(names.empty() ? ": " : ", ", name, " ", launches);
  }
  std::string compilations;
  if (const auto number = all.compiled.size())
    compilations = text("; besides, ", number, " compilations take ",
        static_cast<double>(number) * laws::law("compilation").seconds(0, 0, 0), " s of the host");
  fprintf(stderr,
      "ascend-emulator: modelled time: %llu launches take %.3f ms; %llu of them of %zu operators "
      "without a law, as elementwise ones%s%s\n",
      static_cast<unsigned long long>(all.launches), all.seconds * 1e3,
      static_cast<unsigned long long>(count), all.lawless.size(), names.c_str(),
      compilations.c_str());
}

void count_launch(const Task& task, const laws::Modelled& modelled) {
  if (task.kind == Kind::record || task.kind == Kind::wait || task.kind == Kind::host ||
      task.kind == Kind::graph)
    return;
  auto& all = tracing();
  std::lock_guard lock(all.mutex);
  ++all.launches;
  all.seconds += modelled.seconds;
  if (modelled.law.empty()) ++all.lawless[task.name];
}

double microseconds(Clock::time_point time) {
  return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
}

// The operators without a law, at exit.
Tracing::Tracing() {
  if (shown) std::atexit([] { report_modelled_time(); });
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

// Start and duration in microseconds.
std::string event(const std::string& name, const char* category, const std::string& tid,
    double start, double duration, const std::string& arguments) {
  std::ostringstream out;
  out.precision(3);
  out << std::fixed << "{\"name\": \"" << name << "\", \"cat\": \"" << category
      << "\", \"ph\": \"X\", \"pid\": " << getpid() << ", \"tid\": " << tid << ", \"ts\": " << start
      << ", \"dur\": " << duration << ", \"args\": {" << arguments << "}},\n";
  return out.str();
}

}  // namespace

bool trace_enabled() { return tracing().modelling || traced(); }

bool shows_modelled_time() { return tracing().shown; }

double host_launches(Kind kind) {
  auto& host = tracing().host;
  const bool takes_time =
      kind == Kind::op || kind == Kind::copy || kind == Kind::collective || kind == Kind::graph;
  return takes_time ? host += chip().launch : host.load();
}

void host_reaches(double seconds) {
  if (!trace_enabled()) return;
  auto& host = tracing().host;
  for (double now = host; now < seconds && !host.compare_exchange_weak(now, seconds);) {}
}

void host_compiles(const char* name, const std::string& shapes) {
  {
    std::lock_guard lock(tracing().mutex);
    if (!tracing().compiled.insert(text(name, ' ', shapes)).second) return;
  }
  const double begin = tracing().host;
  host_reaches(begin + laws::law("compilation").seconds(0, 0, 0));
  if (!traced()) return;
  const bool shown = tracing().shown;
  const double seconds = tracing().host - begin;
  const auto thread = std::to_string(1000000 + syscall(SYS_gettid));
  name_thread(thread, text("host ", thread.substr(1), shown ? " (modelled)" : ""));
  add(event(text("compile ", name), "compilation", thread,
      shown ? begin * 1e6 : microseconds(Clock::now()), shown ? seconds * 1e6 : 0,
      text("\"modelled_us\": ", seconds * 1e6, ", \"law\": \"compilation\"")));
}

TaskTrace::TaskTrace(Queue& stream, const Task& task, int shown)
    : on_(trace_enabled()),
      stream_(stream),
      task_(task),
      shown_(shown < 0 ? stream.id : shown),
      scope_(on_ ? &counters_ : nullptr) {
  if (!on_) return;
  stream.modelled = modelled_start_ = std::max(stream.modelled, task.work.earliest);
  start_ = Clock::now();
}

TaskTrace::~TaskTrace() {
  if (!on_) return;
  auto work = task_.work;
  work.bytes += counters_.bytes;
  if (counters_.flops > 0) work.flops = counters_.flops, work.item = counters_.item;
  if (work.link == 0 && counters_.ranks) work.link = counters_.link, work.ranks = counters_.ranks;
  auto counted = work;
  counted.bytes -= counters_.uncounted;
  const auto modelled = laws::modelled(task_.kind, counted, counters_.law);
  count_launch(task_, modelled);
  stream_.modelled += modelled.seconds;
  if (!traced()) return;
  const bool shown = tracing().shown;
  const auto id = std::to_string(shown ? shown_ : stream_.id);
  name_thread(id, text("NPU ", stream_.device, " stream ", id, shown ? " (modelled)" : ""));
  std::ostringstream arguments;
  arguments << "\"npu\": " << stream_.device << ", \"stream\": " << id
            << ", \"bytes\": " << static_cast<int64_t>(work.bytes + work.link)
            << ", \"flops\": " << static_cast<int64_t>(work.flops)
            << ", \"modelled_us\": " << modelled.seconds * 1e6 << ", \"law\": \"" << modelled.law
            << '"';
  if (shown) arguments << ", \"time\": \"modelled\"";
  if (work.rule && work.rule->ai_cpu()) arguments << ", \"core\": \"AI CPU\"";
  if (work.link > 0) arguments << ", \"link\": " << static_cast<int64_t>(work.link);
  if (work.called != Clock::time_point{})
    arguments << ", \"called\": " << static_cast<int64_t>(microseconds(work.called) * 1000)
              << "e-3";
  if (!work.shapes.empty()) arguments << ", \"shapes\": \"" << work.shapes << '"';
  const double start = shown ? modelled_start_ * 1e6 : microseconds(start_);
  const double end = shown ? stream_.modelled * 1e6 : microseconds(Clock::now());
  add(event(task_.name, name_of(task_.kind), id, start, end - start, arguments.str()));
}

HostTrace::HostTrace(const char* name, double copied)
    : name_(name), copied_(copied), on_(trace_enabled()) {
  if (!on_) return;
  start_ = Clock::now();
  modelled_start_ = tracing().host;
}

HostTrace::~HostTrace() {
  if (!on_) return;
  if (copied_ > 0) {
    Work work;
    work.bytes = work.link = copied_;
    host_reaches(modelled_start_ + laws::modelled(Kind::copy, work, nullptr).seconds);
  }
  if (!traced()) return;
  const bool shown = tracing().shown;
  const auto thread = std::to_string(1000000 + syscall(SYS_gettid));
  name_thread(thread, text("host ", thread.substr(1), shown ? " (modelled)" : ""));
  auto arguments = copied_ > 0 ? text("\"bytes\": ", static_cast<int64_t>(copied_)) : "";
  const double start = shown ? modelled_start_ * 1e6 : microseconds(start_);
  const double end = shown ? tracing().host * 1e6 : microseconds(Clock::now());
  add(event(name_, copied_ > 0 ? "copy" : "synchronize", thread, start, end - start, arguments));
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
EXPORT void ascend_emulator_model(int on) {
  emu::tracing().modelling = on != 0 || emu::tracing().shown;
}
