// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "adversary.h"
#include "fault.h"
#include "host_wait.h"
#include "rules.h"
#include "trace.h"

namespace emu {
namespace {

struct StreamTable {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> defaults;
  std::map<int, int> in_graphs;  // device -> streams reserved by graphs
  int next_id = 0;
};
StreamTable& table() { return process.part<StreamTable>(); }

thread_local Stream* worker_of = nullptr;

int count(int device) {
  auto& a = table();
  return a.in_graphs[device] +
         static_cast<int>(std::count_if(a.streams.begin(), a.streams.end(),
             [&](const auto& each) { return each.second->device == device; }));
}

// Drivers from this version on reuse the streams of captured graphs, and earlier ones have another
// code and text for exhausted streams: vllm-project/vllm-ascend pull requests 9962 and 10555,
// issues 2629 and 8393 (at the beginning of a capture).
constexpr int kReusingDriver = 250501;

void check_stream_limit(int device, int wanted, Status status) {
  const int limit = chip().streams, used = count(device);
  const bool is_old = chip().driver && chip().driver < kReusingDriver;
  rule("stream.streams", [&] {
    check(used + wanted <= limit, is_old ? kNoResource : status,
        is_old ? "[SqCqManage]Alloc sq cq fail, retCode=0x7020023; " : "",
        "no stream resource: NPU ", device, " has ", limit, " streams; ", used, " are in use (",
        table().in_graphs[device], " of them by captured graphs) and ", wanted,
        " more are asked for. Capture fewer graphs, or destroy streams");
  });
}

}  // namespace

std::shared_ptr<Stream> Stream::create(int device) {
  int id;
  {
    std::lock_guard lock(table().mutex);
    if (table().next_id == 0) std::atexit([] { process.exit(); });
    id = table().next_id++;
  }
  std::shared_ptr<Stream> stream(new Stream(device, id));
  Adversary::join(stream);
  return stream;
}

uint64_t Stream::submit(Task task) {
  if (fault::armed() && fault::hangs()) {
    task.run = hang;
    task.blocks = true;
    task.brief = false;
  }
  const bool traced = trace_enabled();
  if (traced) task.work.called = Clock::now();
  if (capture.take(*this, task)) return 0;
  if (update.take(*this, task)) return submitted_;
  if (traced) task.work.earliest = host_launches(task.kind);
  const bool brief = task.brief && !Adversary::on();
  if (!task.pinned.empty()) task.guards = host_access::guards(task.pinned);
  uint64_t ticket;
  {
    std::unique_lock lock(mutex_);
    check(!retired_, kNotThisStream, "the stream was destroyed");
    if (submitted_ == 0)
      std::thread([self = shared_from_this()] {
        self->work();
      }).detach();  // at the first task: most streams are never used
    tasks_.push_back(std::move(task));
    ticket = ++submitted_;
    const bool idle = tasks_.size() == 1;
    if (idle && brief) {
      auto* const outer = std::exchange(worker_of, this);
      run_head(lock);
      worker_of = outer;
    }
    if (idle && (!tasks_.empty() || retired_)) arrived_.notify_one();
  }
  Adversary::submitted();
  return ticket;
}

bool Stream::wait(uint64_t ticket, Deadline deadline) {
  if (!reached(ticket)) {
    check(worker_of != this, kOpFailed, "a task waits for its own stream");
    const HostWait unlocked;  // before the mutex is locked, and until it is released
    Adversary::Demand demand(*this, ticket);
    std::unique_lock lock(mutex_);
    const auto done = [&] { return reached(ticket); };
    if (worker_of) {  // another stream's worker, which can be aborted
      while (!progressed_.wait_for(lock, std::chrono::milliseconds(50), done)) {
        check_not_aborted();
        if (deadline && Clock::now() >= *deadline) return false;
      }
    } else if (!deadline) {
      progressed_.wait(lock, done);
    } else if (!progressed_.wait_until(lock, *deadline, done)) {
      return false;
    }
  }
  check_failure();
  return true;
}

void Stream::check_failure() {
  std::lock_guard lock(mutex_);
  if (failure_) throw *failure_;
}

void Stream::synchronize(Deadline deadline, Status timeout) {
  check(wait(submitted(), deadline), timeout, "the deadline passed while stream ", id, " of NPU ",
      device, " ran ", running_task_name());
}

std::string Stream::running_task_name() {
  std::lock_guard lock(mutex_);
  return tasks_.empty() ? "nothing" : tasks_.front().name;
}

namespace {
constexpr const char* kBlocking = "; ASCEND_LAUNCH_BLOCKING=1 raises it at its call";

bool is_asynchronous() {
  static const char* const blocking = std::getenv("ASCEND_LAUNCH_BLOCKING");
  return !blocking || std::strcmp(blocking, "1") != 0;
}
bool ends_with(std::string_view text, const char* with) {
  return text.ends_with(std::string(with) + ")");
}
}  // namespace

void Stream::perform(Task& task) {
  {
    std::lock_guard lock(mutex_);
    if ((failure_ || aborting_) && task.kind != Kind::record) return;
  }
  try {
    TaskTrace observed(*this, task);
    for (const auto& guard : task.guards) guard->begin();
    task.run();
  } catch (const std::exception& e) {
    // Arguments were checked at the call, so these are values and memory that no device checks.
    const bool computes = task.kind != Kind::host && task.kind != Kind::wait;
    auto error = computes ? classified(error_of(e), kUndefined) : error_of(e);
    // The node of a graph is named already, and has no call but the replay.
    const bool is_late = computes && task.kind != Kind::graph && is_asynchronous();
    if (is_late && ends_with(error.what(), kUndefined))
      error = Error(error.status, text(error.what(), kBlocking), true);
    const std::string reason = error.what();
    const bool passed_on = task.kind == Kind::wait || reason.rfind(task.name, 0) == 0;
    std::lock_guard lock(mutex_);
    failure_ = Error(error.status, passed_on ? reason : text(task.name, ": ", reason), true);
  }
}

void Stream::work() {
  worker_of = this;
  pthread_setname_np(pthread_self(), text("npu", device, "-stream", id).substr(0, 15).c_str());
  set_current_device(device);
  prepare_worker();
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [&] { return !running_ && (!tasks_.empty() || retired_); });
    if (tasks_.empty()) return;
    run_head(lock);
    lock.unlock();
    Adversary::completed(*this);
    lock.lock();
  }
}

void Stream::run_head(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  Task& task = tasks_.front();
  lock.unlock();
  {
    Adversary::Turn turn(*this, task.blocks);
    perform(task);
  }
  // Release the task's arguments before it counts as completed: the caller may free the memory
  // then.
  task.run = nullptr;
  task.guards.clear();
  lock.lock();
  tasks_.pop_front();
  running_ = false;
  if (aborting_.exchange(false)) failure_.reset();
  ++completed_;
  progressed_.notify_all();
}

void check_not_aborted() {
  if (worker_of && worker_of->aborting_) throw Error(kOpFailed, "the stream was aborted", true);
}

void hang() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    check_not_aborted();
  }
}

Stream& running_stream() {
  check(worker_of != nullptr, kOpFailed, "not on a stream's thread");
  return *worker_of;
}

std::shared_ptr<TaskSink> SinkSlot::get() const {
  if (!filled_) return nullptr;
  std::lock_guard lock(mutex_);
  return sink_;
}

bool SinkSlot::set(const std::shared_ptr<TaskSink>& sink) {
  std::lock_guard lock(mutex_);
  if (sink_) return false;
  sink_ = sink;
  return filled_ = true;
}

std::shared_ptr<TaskSink> SinkSlot::clear() {
  std::lock_guard lock(mutex_);
  filled_ = false;
  return std::exchange(sink_, nullptr);
}

bool SinkSlot::take(Stream& stream, Task& task) const {
  const auto sink = get();
  return sink && sink->take(stream, task);
}

Queue::Head Stream::head() {
  std::lock_guard lock(mutex_);
  if (tasks_.empty()) return {};
  const auto& mark = tasks_.front().waits_for;
  return {true, mark && !mark->stream->reached(mark->ticket) ? mark->stream : nullptr};
}

// The capture remains valid (torch_npu's test_aclgraph_rng_state.py,
// test_graph_rng_after_failed_capture).
void check_not_captured(const Stream& stream) {
  rule("stream.wait-in-capture", [&] {
    check(!stream.capture, kStreamCaptured,
        "the stream is being captured, and does not run until the graph is replayed");
  });
}

void Stream::start_abort() {
  std::deque<Task> dropped;  // destroyed without the lock
  {
    std::lock_guard lock(mutex_);
    aborting_ = running_;
    failure_.reset();
    for (; tasks_.size() > running_; tasks_.pop_back()) dropped.push_back(std::move(tasks_.back()));
    completed_ += dropped.size();
    progressed_.notify_all();
  }
  Adversary::dropped(*this);
}

void Stream::finish_abort(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return !aborting_; };
  if (worker_of == this || tasks_.empty()) return;
  if (tasks_.front().blocks) progressed_.wait_until(lock, until, ended);
  else progressed_.wait(lock, ended);
}

void Stream::abort(const std::vector<std::shared_ptr<Stream>>& streams) {
  const auto until = Clock::now() + std::chrono::seconds(1);
  for (const auto& stream : streams) stream->start_abort();
  for (const auto& stream : streams) stream->finish_abort(until);
}

void Stream::retire() {
  std::lock_guard lock(mutex_);
  retired_ = true;
  arrived_.notify_one();
}

std::shared_ptr<Stream> stream_at(void* handle) {
  auto& a = table();
  if (!handle) {
    const int device = current_device();
    {
      std::lock_guard lock(a.mutex);
      if (auto found = a.defaults.find(device); found != a.defaults.end()) return found->second;
    }
    auto made = Stream::create(device);
    std::lock_guard lock(a.mutex);
    auto [at, added] = a.defaults.emplace(device, made);
    if (added) a.streams[made.get()] = made;
    else made->retire();
    return at->second;
  }
  std::lock_guard lock(a.mutex);
  const auto found = a.streams.find(handle);
  check(found != a.streams.end(), kNotThisStream, handle, " is no stream, or it was destroyed");
  return found->second;
}

Stream& stream_of(void* handle) { return *stream_at(handle); }

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> found;
  std::lock_guard lock(table().mutex);
  for (const auto& [_, stream] : table().streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

void* add_stream(std::shared_ptr<Stream> stream) {
  std::lock_guard lock(table().mutex);
  try {
    check_stream_limit(stream->device, 1, kNoStream);
  } catch (...) {
    stream->retire();
    throw;
  }
  void* handle = stream.get();
  table().streams[handle] = std::move(stream);
  return handle;
}

std::shared_ptr<Stream> remove_stream(void* handle) {
  auto stream = stream_at(handle);
  std::lock_guard lock(table().mutex);
  table().streams.erase(handle);
  return stream;
}

void reserve_streams(int device, int wanted, Status status) {
  if (chip().driver >= kReusingDriver) return;
  std::lock_guard lock(table().mutex);
  if (wanted > 0) check_stream_limit(device, wanted, status);
  table().in_graphs[device] += wanted;
}

void end_streams(int device) {
  for (const auto& stream : streams_of(device)) {
    try {
      stream->synchronize();
    } catch (const Error&) {  // of a failed task
    }
    stream->retire();
    stream->update.clear();
    std::lock_guard lock(table().mutex);
    table().streams.erase(stream.get());
  }
  std::lock_guard lock(table().mutex);
  table().defaults.erase(device);
}

void stop_streams() {
  std::vector<std::shared_ptr<Stream>> every;
  {
    std::lock_guard lock(table().mutex);
    for (const auto& [_, stream] : table().streams) every.push_back(stream);
  }
  Stream::abort(every);
  for (const auto& stream : every) stream->retire();
}

bool null_mode() {
  static const bool on =
      std::getenv("ASCEND_EMULATOR_NULL") && *std::getenv("ASCEND_EMULATOR_NULL") == '1';
  return on;
}

}  // namespace emu

// For ascend_emulator.tracing: the device time of the latest stream in seconds. Synchronize first.
EXPORT double ascend_emulator_modelled(int device) {
  double most = 0;
  for (const auto& stream : emu::streams_of(device)) most = std::max(most, stream->modelled);
  return most;
}
// Aligns the device's streams after a synchronization.
EXPORT void ascend_emulator_align(int device) {
  emu::host_reaches(ascend_emulator_modelled(device));
  const double now = emu::host_launches(emu::Kind::record);  // A record takes the host no time.
  for (const auto& stream : emu::streams_of(device)) stream->modelled = now;
}
