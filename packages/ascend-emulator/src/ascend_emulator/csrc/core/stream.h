// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Streams and events. A stream is a queue with a worker thread that runs the tasks in order;
// submitting returns immediately. A brief task of an idle stream is run by the thread that submits
// it, because waking the worker takes longer.
//
// A task that throws fails its stream: later tasks do not run, and synchronizing throws the error,
// as does waiting for an event that was recorded after it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "device.h"
#include "task.h"

namespace emu {

struct Capture;  // graph.h

// Takes the tasks that are submitted to a stream, instead of its worker: a capture, or the update
// of a task group (graph.h).
class TaskSink {
 public:
  virtual ~TaskSink() = default;
  virtual bool take(Stream& stream, Task& task) = 0;  // false if it takes none
};

// The sink of a stream, if there is one.
class SinkSlot {
 public:
  explicit operator bool() const { return filled_; }
  std::shared_ptr<TaskSink> get() const;
  bool set(const std::shared_ptr<TaskSink>& sink);  // false if there is one already
  std::shared_ptr<TaskSink> clear();
  bool take(Stream& stream, Task& task) const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> filled_{false};
  std::shared_ptr<TaskSink> sink_;
};

class Stream : public Queue, public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> create(int device);

  // Appends the task, or captures it. Returns its ticket, 0 if captured.
  uint64_t submit(Task task);
  template <class Run> uint64_t submit_brief(const char* name, Kind kind, Run&& run) {
    Task task{name, std::forward<Run>(run), kind};
    task.brief = true;
    return submit(std::move(task));
  }

  uint64_t submitted() const { return submitted_; }
  uint64_t completed() const override { return completed_; }
  Head head() override;
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

  SinkSlot capture, update;

 private:
  friend void check_not_aborted();
  Stream(int device, int id) : Queue(device, id) {}
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
};

// The stream whose worker calls.
Stream& running_stream();

// For tasks that may wait long: throws when their stream is aborted.
void check_not_aborted();
// The task of an injected fault: runs until its stream is aborted.
void hang();
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

// Throws if the stream is being captured: the host cannot wait for it.
void check_not_captured(const Stream& stream);

// Destroys all streams of the device, once their tasks are done.
void end_streams(int device);

// Stops all worker threads; called at exit.
void stop_streams();

// ASCEND_EMULATOR_NULL: operators are not executed.
bool null_mode();

}  // namespace emu
