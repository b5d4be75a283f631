// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Streams and events. A stream is a queue with a worker thread that runs the tasks in order;
// submitting returns immediately. A brief task of an idle stream is run by the thread that submits
// it, because waking the worker takes longer.
//
// A task that throws fails its stream: later tasks do not run, and synchronizing throws the error,
// as does waiting for an event that was recorded after it.
#ifndef ASCEND_EMULATOR_CORE_STREAM_H
#define ASCEND_EMULATOR_CORE_STREAM_H
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device.h"

namespace emu {

using Clock = std::chrono::steady_clock;
using Deadline = std::optional<Clock::time_point>;  // nullopt: no timeout

class Stream;
struct Capture;  // graph.h

// Position in a stream.
struct Mark {
  std::shared_ptr<Stream> stream;
  uint64_t ticket = 0;  // reached when the stream has completed this many tasks
  std::atomic<bool> stamped{false};
  Clock::time_point time{};  // when it was reached
  double modelled = 0;       // seconds, by the roofline model (trace.h)
};

enum class Kind : uint8_t { op, copy, record, wait, host, collective, graph };

// Cost of a task, for the trace and the roofline model; filled in only while they are enabled.
struct Work {
  double bytes = 0;  // of device memory, read and written
  double flops = 0;
  int item = 0;        // element size of a matrix product in bytes; 0: vector cores
  double link = 0;     // bytes over links, of collectives
  std::string shapes;  // of its arguments
  Clock::time_point called{};
};

struct Task {
  const char* name;
  std::function<void()> run;
  Kind kind = Kind::op;
  bool blocks = false;  // may wait for something other than this process's streams
  bool brief =
      false;  // does not wait and computes little: an idle stream runs it in the caller's thread
  std::shared_ptr<Mark> waits_for{};  // of Kind::wait
  Work work{};
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> create(int device);

  // Appends the task, or captures it. Returns its ticket, 0 if captured.
  uint64_t submit(Task task);
  template <class Run>
  uint64_t submit_brief(const char* name, Kind kind, Run&& run) {
    Task task{name, std::forward<Run>(run), kind};
    task.brief = true;
    return submit(std::move(task));
  }

  uint64_t submitted() const { return submitted_; }
  uint64_t completed() const { return completed_; }
  bool reached(uint64_t ticket) const { return completed_ >= ticket; }
  bool idle() const { return completed_ == submitted_; }
  // Waits until the ticket is reached; false on timeout. Throws the error of a failed task.
  bool wait(uint64_t ticket, Deadline deadline = {});
  void synchronize(Deadline deadline = {}, Status timeout = kStreamSyncTimeout);
  void check_failure();  // throws the error of a failed task

  // Drops queued tasks and a failure. finish_abort() returns when no task runs; a task that blocks
  // may ignore the abort, and is waited for until the deadline only.
  void start_abort();
  void finish_abort(Clock::time_point until);
  static void abort(const std::vector<std::shared_ptr<Stream>>& streams);
  void retire();                    // ends the thread once the queue is empty
  std::string running_task_name();  // for messages

  const int device;
  const int id;
  double modelled = 0;  // device time in seconds by the roofline model; accessed by the worker only

  // The capture that the stream takes part in (graph.h), null if none.
  bool captured() const { return captured_; }
  std::shared_ptr<Capture> capture() const;
  bool enter(const std::shared_ptr<Capture>& capture);  // false if it takes part in one already
  void leave_capture();

 private:
  friend class Adversary;
  friend void check_not_aborted();
  Stream(int device, int id) : device(device), id(id) {}
  void work();
  void perform(Task& task);
  void run_head(std::unique_lock<std::mutex>&
          lock);  // runs the first task of the queue; locked before and after

  std::mutex mutex_;
  std::condition_variable arrived_, progressed_;
  std::deque<Task> tasks_;  // the running task is the head
  std::atomic<uint64_t> submitted_{0}, completed_{0};
  std::optional<Error> failure_;
  bool retired_ = false, running_ = false;
  std::atomic<bool> aborting_{false};  // until the running task has ended
  mutable std::mutex capture_mutex_;
  std::atomic<bool> captured_{false};
  std::shared_ptr<Capture> capture_;
};

// The stream whose worker calls.
Stream& running_stream();

// For tasks that may wait long: throws when their stream is aborted.
void check_not_aborted();
// Prepares a worker thread for ATen (operator/op.cpp).
void prepare_worker();

struct Event {
  uint32_t flags = 0;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // of the latest record
  std::shared_ptr<std::atomic<int>> waits =
      std::make_shared<std::atomic<int>>(0);  // streams' waits that are not complete
  std::weak_ptr<Capture> captured;            // the capture that recorded it last
  int node = -1;
};

std::shared_ptr<Stream> stream_at(
    void* handle);                // throws if invalid; null: the current device's default stream
Stream& stream_of(void* handle);  // valid until the stream is destroyed
std::vector<std::shared_ptr<Stream>> streams_of(int device);
void* add_stream(std::shared_ptr<Stream> stream);  // throws if the device's streams are exhausted
std::shared_ptr<Stream> remove_stream(void* handle);
// Reserves streams for graphs of the device; throws with `status` if they are exhausted.
void reserve_streams(int device, int count, Status status);

// Throws if the stream is being captured: the host cannot wait for it (graph.cpp).
void check_not_captured(const Stream& stream);
// Throws if the mode of an active capture, on any stream, forbids this call.
void check_capture_mode(const char* call);

// Destroys all streams of the device, once their tasks are done.
void end_streams(int device);

// Stops all worker threads; called at exit.
void stop_streams();

// ASCEND_EMULATOR_NULL: operators are not executed.
bool null_mode();

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_STREAM_H
