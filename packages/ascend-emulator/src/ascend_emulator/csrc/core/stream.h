// Streams and events. A stream is a queue with a thread of its own, which runs the tasks in order; submitting returns at once.
//
// A task that throws fails its stream: what was submitted after it does not run, and synchronizing throws its error, as does a
// stream that waits for an event recorded behind it.
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
using Deadline = std::optional<Clock::time_point>;  // none waits for ever

class Stream;
struct Capture;  // graph.h

// A point in a stream's order.
struct Mark {
  std::shared_ptr<Stream> stream;
  uint64_t ticket = 0;  // reached when the stream has done this many tasks
  std::atomic<bool> stamped{false};
  Clock::time_point time{};  // when it was reached
  double modelled = 0;       // seconds, by the roofline model (trace.h)
};

enum class Kind : uint8_t { op, copy, record, wait, host, collective, graph };

// What a task costs, for observation; filled in only while somebody observes.
struct Work {
  double bytes = 0;  // of device memory, read and written
  double flops = 0;
  int item = 0;        // bytes of an element of a matrix product, 0 where vector cores compute
  double link = 0;     // bytes over links, of collectives
  std::string shapes;  // of its arguments
};

struct Task {
  const char* name;
  std::function<void()> run;
  Kind kind = Kind::op;
  bool blocks = false;                // may wait for something that is no stream of this process
  std::shared_ptr<Mark> waits_for{};  // of Kind::wait
  Work work{};
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> create(int device);

  // Appends the task, or captures it; the result is its ticket, 0 if captured.
  uint64_t submit(Task task);
  template <class Run>
  uint64_t submit(const char* name, Kind kind, Run&& run) {
    return submit(Task{name, std::forward<Run>(run), kind});
  }

  uint64_t submitted() const { return submitted_; }
  uint64_t completed() const { return completed_; }
  bool reached(uint64_t ticket) const { return completed_ >= ticket; }
  bool idle() const { return completed_ == submitted_; }
  // Waits until the ticket is reached; false when the deadline passed. Throws the error of a task before it that failed.
  bool wait(uint64_t ticket, Deadline deadline = {});
  void synchronize(Deadline deadline = {}, Status timeout = kStreamSyncTimeout);
  void check_failure();  // throws the error of a task that failed

  void abort();             // drops what is queued, forgets a failure; returns when no task runs, or after a second
  void retire();            // ends the thread once the queue is empty
  std::string what_runs();  // name of the task at the head, for messages

  const int device;
  const int id;
  std::shared_ptr<Capture> capture;  // while it captures: what is submitted goes there (graph.h)
  double modelled = 0;               // seconds since the start by the roofline model; the worker's alone

 private:
  friend class Adversary;
  friend void check_not_aborted();
  Stream(int device, int id) : device(device), id(id) {}
  void work();
  void perform(Task& task);

  std::mutex mutex_;
  std::condition_variable arrived_, progressed_;
  std::deque<Task> tasks_;  // the head stays while it runs
  std::atomic<uint64_t> submitted_{0}, completed_{0};
  std::optional<Error> failure_;
  bool retired_ = false, running_ = false;
  std::atomic<bool> aborting_{false};
};

// For a task that may wait long: throws once its stream is aborted.
void check_not_aborted();
// What a worker's thread wants before it computes (op.cpp).
void prepare_worker();

struct Event {
  uint32_t flags = 0;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;       // of the latest record
  std::weak_ptr<Capture> captured;  // the capture that recorded it last
  int node = -1;
};

std::shared_ptr<Stream> stream_at(void* handle);  // throws on a handle that is none; null is the current device's default stream
Stream& stream_of(void* handle);                  // the same, valid until the stream is destroyed
std::vector<std::shared_ptr<Stream>> streams_of(int device);
void* add_stream(std::shared_ptr<Stream> stream);  // throws when the device has no more streams
std::shared_ptr<Stream> take_stream(void* handle);
// Streams that graphs of the device hold; taking more than there are throws with that status.
void reserve_streams(int device, int count, Status status);

// The host cannot wait for a stream that is being captured (graph.cpp).
void check_not_captured(const Stream& stream);
// For calls that the mode of a capture, on whichever stream, forbids.
void check_capture_mode(const char* call);

// Stops every thread; called at exit, before libraries are torn down.
void stop_streams();

// ASCEND_EMULATOR_NULL: operators are not computed.
bool null_mode();

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_STREAM_H
