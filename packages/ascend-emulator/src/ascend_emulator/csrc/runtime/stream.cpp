// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Streams, events, synchronisation and callbacks. Signatures: see device.cpp; behaviour: CANN's
// public API reference ("Stream Management", "Event Management", "Synchronization") and torch_npu's
// NPUEvent.cpp, AsyncTaskQueueInterface.cpp and Graph.cpp.
#include "core/stream.h"

#include <sys/prctl.h>

#include <cstring>
#include <map>

#include "core/graph.h"
#include "core/recheck.h"
#include "core/refusal.h"
#include "core/entry_point.h"
#include "core/trace.h"

using namespace emu;

namespace {

constexpr uint32_t kEventTimeline = 8, kEventSync = 1, kEventStreamProgress = 2;

Deadline after(int32_t milliseconds) {
  if (milliseconds < 0) return {};
  return Clock::now() + std::chrono::milliseconds(milliseconds);
}

struct Events {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Event>> living;
  std::atomic<uint32_t> wait_timeout{0};  // seconds, of the waits submitted from now on; 0: none
};
Events& events() { return process.part<Events>(); }

std::shared_ptr<Event> event_at(void* handle) {
  check(handle != nullptr, kInvalidParam, "the event is null");
  std::lock_guard lock(events().mutex);
  const auto found = events().living.find(handle);
  check(found != events().living.end(), kInvalidParam, handle, " is no event, or it was destroyed");
  return found->second;
}

void create_event(void** handle, uint32_t flags) {
  auto event = std::make_shared<Event>();
  event->flags = flags;
  std::lock_guard lock(events().mutex);
  *handle = event.get();
  events().living[event.get()] = std::move(event);
}

// Exported to another process, where it counts as complete; it must not be recorded again.
constexpr uint32_t kExported = 1u << 31;

void record(Event& event, const std::shared_ptr<Stream>& stream) {
  check_emulated(!(event.flags & kExported), kUnsupported,
      "recording an event again whose handle another process was given is not emulated");
  // Callback reports are not captured: captured tasks do not run.
  if (!(stream->capture && (event.flags & kEventStreamProgress) && event.flags != 0xE) &&
      capture_record(*stream, event))
    return;
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  std::lock_guard lock(event.mutex);
  if (stream->capture) {
    mark->ticket = stream->submitted();
    mark->time = Clock::now();
    mark->stamped = true;
  } else {
    mark->ticket =
        stream->submit_brief("aclrtRecordEvent", Kind::record, [mark, on = stream.get()] {
          mark->time = Clock::now();
          mark->modelled = on->modelled;
          mark->stamped = true;
        });
  }
  event.mark = mark;
}

void wait(const std::shared_ptr<Stream>& stream, Event& event) {
  if (capture_wait(*stream, event)) return;
  std::shared_ptr<Mark> mark;
  {
    std::lock_guard lock(event.mutex);
    mark = event.mark;
  }
  if (!mark || mark->stream == stream) return;
  // Counts as complete when the task ends or is dropped.
  ++*event.waits;
  const std::shared_ptr<void> pending(nullptr, [waits = event.waits](void*) { --*waits; });
  Task task{"aclrtStreamWaitEvent",
      [mark, on = stream.get(), pending, seconds = events().wait_timeout.load()] {
        const auto deadline =
            seconds ? Deadline(Clock::now() + std::chrono::seconds(seconds)) : Deadline();
        check(mark->stream->wait(mark->ticket, deadline), kEventSyncTimeout,
            "the event was not reached within ", seconds, " s (aclrtSetOpWaitTimeout)");
        on->modelled = std::max(on->modelled, mark->modelled);
      },
      Kind::wait};
  task.brief = mark->stream->reached(mark->ticket);
  task.waits_for = mark;
  stream->submit(std::move(task));
}

// Latest record of an event; null if it was never recorded.
std::shared_ptr<Mark> mark_of(Event& event) {
  std::lock_guard lock(event.mutex);
  check(event.captured.expired(), kEventCaptured,
      "the event was recorded in a capture, which has no time of its own");
  return event.mark;
}

void synchronize_event(void* handle, Deadline deadline) {
  const auto event = event_at(handle);
  HostTrace observed("aclrtSynchronizeEvent");
  const auto mark = mark_of(*event);
  check_queue(mark ? mark->stream->device : current_device());
  if (mark)
    check(mark->stream->wait(mark->ticket, deadline), kEventSyncTimeout,
        "the deadline passed while stream ", mark->stream->id, " ran ",
        mark->stream->running_task_name());
  if (mark && mark->stamped) host_reaches(mark->modelled);
}

void synchronize_device(const char* call, Deadline deadline) {
  HostTrace observed(call);
  check_queue(current_device());
  const auto streams = streams_of(current_device());
  for (const auto& stream : streams) check_not_captured(*stream);
  for (const auto& stream : streams) {
    stream->synchronize(deadline);
    host_reaches(stream->modelled);
  }
}

void synchronize_stream(const char* call, void* handle, Deadline deadline) {
  const auto stream = stream_at(handle);
  check_not_captured(*stream);
  HostTrace observed(call);
  check_queue(stream->device);
  stream->synchronize(deadline);
  host_reaches(stream->modelled);
}

// A callback that waits for its thread.
struct Report {
  void (*call)(void*);
  void* data;
  std::shared_ptr<std::atomic<bool>> done;
};
struct Reports {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, uint64_t> subscribed;  // id of a stream -> thread that processes its callbacks
  std::map<uint64_t, std::deque<Report>> pending;  // by the thread
};
Reports& reports() { return process.part<Reports>(); }

void unsubscribe(const Stream& stream) {
  std::lock_guard lock(reports().mutex);
  reports().subscribed.erase(stream.id);
}

void destroy(void* handle, bool force) {
  // CANN's code for a call that a stream in a capture does not allow
  // (torch_npu/csrc/core/npu/NPUErrorCodes.h).
  check(!stream_of(handle).capture, kStreamCaptured,
      "the stream is being captured; end the capture first");
  const auto stream = remove_stream(handle);
  if (force) Stream::abort({stream});
  stream->retire();
  stream->update.clear();
  unsubscribe(*stream);
}

}  // namespace

ACL_API(computed, aclrtCreateStream, (void** stream),
    { *stream = add_stream(Stream::create(current_device())); })
// Between the creation of an NPU's first two streams, torch_npu starts its release_thread
// (NPUStream.cpp, initGlobalStreamState), which polls every microsecond. A timer slack of 1 ms for
// it leaves the CPU to the operators.
namespace {
void slow_release_thread(int npu) {
  thread_local int before = 0;
  if (before) {
    prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before));
    before = 0;
  } else if (streams_of(npu).empty()) {
    before = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1000000ul);
  }
}
}  // namespace
// Priorities beyond 7 are clamped, and unknown flags are ignored (CANN's documentation). Flags 0x4,
// 0x10 and 0x20: tasks that are not executed at once, or not by a device.
ACL_API(computed, aclrtCreateStreamWithConfig, (void** stream, uint32_t, uint32_t flags), {
  check_emulated((flags & 0x34) == 0, kUnsupported, "stream flags ", flags,
      " are not emulated; 1, 2 and 8 are");
  slow_release_thread(current_device());
  *stream = add_stream(Stream::create(current_device()));
})
ACL_API(computed, aclrtDestroyStream, (void* stream), { destroy(stream, false); })
ACL_API(computed, aclrtDestroyStreamForce, (void* stream), { destroy(stream, true); })
ACL_API(computed, aclrtDeviceTaskAbort, (int32_t id, uint32_t),
    { Stream::abort(streams_of(device(id).id)); })
ACL_API(answers, aclrtStreamGetId, (void* stream, int32_t* id), { *id = stream_of(stream).id; })
// A stream stops at its first failure in both modes.
ACL_API(nothing("a stream stops at its first failure in either mode"), aclrtSetStreamFailureMode,
    (void* stream, uint64_t), { stream_of(stream); })
// Attributes: 1 failure mode, 2 overflow check, 3 a tag, 4 whether shapes are reported to the
// profiler, 5 priority. Only 2 affects results. Values: CANN's documentation of
// aclrtStreamAttrValue.
ACL_API(nothing("no attribute changes a result"), aclrtSetStreamAttribute,
    (void* stream, int32_t attribute, const void* value), {
      stream_of(stream);
      check(value != nullptr, kInvalidParam, "value is null");
      const uint64_t most[] = {0, 1, 1, UINT32_MAX, 1, 7};
      check(attribute >= 1 && attribute <= 5, kInvalidParam, "stream attribute ", attribute,
          "; supported: 1 to 5");
      const uint64_t given = attribute == 1 ? *static_cast<const uint64_t*>(value)
                                            : *static_cast<const uint32_t*>(value);
      check(given <= most[attribute], kInvalidParam, "stream attribute ", attribute, " is ", given,
          "; allowed: 0 to ", most[attribute]);
      check_emulated(
          attribute != 2 || given == 0, kUnsupported, "overflow detection is not emulated");
    })
// Overflow is not detected: results keep infinities (aclGetCannAttribute).
ACL_API(nothing("overflow is never watched for: results keep infinities and NaNs"),
    aclrtSetStreamOverflowSwitch, (void*, uint32_t on),
    { check_emulated(on == 0, kUnsupported, "overflow detection is not emulated"); })
ACL_API(answers, aclrtGetStreamOverflowSwitch, (void*, uint32_t* on), { *on = 0; })
// aclrtStreamStatus: 0 complete, 1 not ready.
ACL_API(computed, aclrtStreamQuery, (void* handle, int32_t* status), {
  const auto stream = stream_at(handle);
  check(!stream->capture, kStreamCaptured, "the stream is being captured");
  *status = stream->idle() ? 0 : 1;
  if (*status == 0) stream->check_failure();
})
ACL_API(computed, aclrtSynchronizeStream, (void* stream),
    { synchronize_stream("aclrtSynchronizeStream", stream, {}); })
ACL_API(computed, aclrtSynchronizeStreamWithTimeout, (void* stream, int32_t milliseconds),
    { synchronize_stream("aclrtSynchronizeStreamWithTimeout", stream, after(milliseconds)); })
ACL_API(computed, aclrtSynchronizeDevice, (), { synchronize_device("aclrtSynchronizeDevice", {}); })
ACL_API(computed, aclrtSynchronizeDeviceWithTimeout, (int32_t milliseconds),
    { synchronize_device("aclrtSynchronizeDeviceWithTimeout", after(milliseconds)); })

// "aclrtCreateEvent" of CANN's API reference: an event for synchronization and for times.
ACL_API(computed, aclrtCreateEvent, (void** event),
    { create_event(event, kEventTimeline | kEventSync); })
ACL_API(computed, aclrtCreateEventWithFlag, (void** event, uint32_t flags),
    { create_event(event, flags); })
ACL_API(computed, aclrtCreateEventExWithFlag, (void** event, uint32_t flags),
    { create_event(event, flags); })
ACL_API(computed, aclrtDestroyEvent, (void* event), {
  event_at(event);
  std::lock_guard lock(events().mutex);
  events().living.erase(event);
})
ACL_API(computed, aclrtRecordEvent, (void* event, void* stream),
    { record(*event_at(event), stream_at(stream)); })
ACL_API(computed, aclrtStreamWaitEvent, (void* stream, void* event),
    { wait(stream_at(stream), *event_at(event)); })
ACL_API(computed, aclrtResetEvent, (void* event, void*), {
  const auto reset = event_at(event);
  std::lock_guard lock(reset->mutex);
  reset->mark.reset();
})
ACL_API(computed, aclrtSynchronizeEvent, (void* event), { synchronize_event(event, {}); })
// aclrtEventRecordedStatus: 0 not ready, 1 complete. An event that was never recorded counts as
// complete (torch.npu.Event.query).
ACL_API(computed, aclrtQueryEventStatus, (void* event, int32_t* status), {
  const auto mark = mark_of(*event_at(event));
  *status = !mark || mark->stream->reached(mark->ticket) ? 1 : 0;
  if (*status && mark) mark->stream->check_failure();
})
// aclrtEventWaitStatus: 0 complete, 1 not ready. A wait keeps its record alive, so the event may be
// destroyed at any time.
ACL_API(computed, aclrtQueryEventWaitStatus, (void* event, int32_t* status),
    { *status = *event_at(event)->waits > 0; })
ACL_API(keeps, aclrtSetOpWaitTimeout, (uint32_t seconds), { events().wait_timeout = seconds; })
ACL_API(computed, aclrtEventElapsedTime, (float* milliseconds, void* start, void* end), {
  const auto from = event_at(start);
  const auto to = event_at(end);
  check((from->flags & to->flags & kEventTimeline) != 0, kInvalidParam,
      "an event was made without timing (ACL_EVENT_TIME_LINE; "
      "torch.npu.Event(enable_timing=True))");
  const auto first = mark_of(*from);
  const auto last = mark_of(*to);
  check(first && last && first->stamped && last->stamped, kInvalidParam,
      "both events must have been recorded and reached");
  *milliseconds = shows_modelled_time()
                      ? static_cast<float>((last->modelled - first->modelled) * 1e3)
                      : std::chrono::duration<float, std::milli>(last->time - first->time).count();
})
ACL_API(computed, aclrtEventGetTimestamp, (void* event, uint64_t* microseconds), {
  const auto mark = mark_of(*event_at(event));
  check(mark && mark->stamped, kInvalidParam, "the event must have been recorded and reached");
  const std::chrono::duration<double> modelled(mark->modelled),
      machine = mark->time.time_since_epoch();
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(
      shows_modelled_time() ? modelled : machine)
                      .count();
})

// Streams write values to device memory and wait for them (torch.npu.ExternalEvent).
namespace {
bool holds(uint64_t found, uint64_t wanted, uint32_t flag) {
  switch (flag) {
    case 0: return found >= wanted;
    case 1: return found == wanted;
    case 2: return (found & wanted) != 0;
    default: return (~(found | wanted)) != 0;
  }
}
}  // namespace
ACL_API(computed, aclrtValueWrite, (void* address, uint64_t value, uint32_t flag, void* stream), {
  check(flag == 0, kInvalidParam, "flag ", flag, "; supported: 0");
  const Recheck memory;
  std::atomic_ref at(*static_cast<uint64_t*>(to_kernel(address, sizeof(uint64_t))));
  stream_of(stream).submit_brief("aclrtValueWrite", Kind::host, [at, value, memory, address] {
    memory.verify([&] { memory.check("the value", address, sizeof(uint64_t)); });
    at.store(value);
  });
})
ACL_API(computed, aclrtValueWait, (void* address, uint64_t value, uint32_t flag, void* stream), {
  check(flag <= 3, kInvalidParam, "flag ", flag,
      "; supported: 0 (not less), 1 (equal), 2 (and) and 3 (nor)");
  const Recheck memory;
  std::atomic_ref at(*static_cast<uint64_t*>(to_kernel(address, sizeof(uint64_t))));
  Task task{"aclrtValueWait",
      [at, value, flag, memory, address] {
        memory.verify([&] { memory.check("the value", address, sizeof(uint64_t)); });
        // Polls: copies write values too, and a thread that writes one would take longer to wake
        // this one.
        for (const auto start = Clock::now(); !holds(at.load(), value, flag);) {
          check_not_aborted();
          const auto longer = Clock::now() - start > std::chrono::milliseconds(5);
          std::this_thread::sleep_for(std::chrono::microseconds(longer ? 1000 : 50));
        }
      },
      Kind::host};
  task.blocks = true;
  stream_of(stream).submit(std::move(task));
})

// Host functions run on the stream's worker. Callbacks run on the thread that subscribed to the
// stream and processes reports.
ACL_API(computed, aclrtLaunchHostFunc, (void* stream, void (*function)(void*), void* data), {
  check(function != nullptr, kInvalidParam, "the function is null");
  Task task{"aclrtLaunchHostFunc", [function, data] { function(data); }, Kind::host};
  task.blocks = true;
  stream_of(stream).submit(std::move(task));
})
ACL_API(computed, aclrtSubscribeReport, (uint64_t thread, void* stream), {
  auto& of = stream_of(stream);
  std::lock_guard lock(reports().mutex);
  check(reports().subscribed.emplace(of.id, thread).second, static_cast<Status>(107011),
      "the stream is subscribed already");
  reports().pending[thread];
})
ACL_API(computed, aclrtUnSubscribeReport, (uint64_t thread, void* stream), {
  auto& of = stream_of(stream);
  std::lock_guard lock(reports().mutex);
  const auto at = reports().subscribed.find(of.id);
  check(at != reports().subscribed.end() && at->second == thread, static_cast<Status>(107011),
      "the thread is not subscribed for this stream");
  reports().subscribed.erase(at);
})
ACL_API(computed, aclrtLaunchCallback,
    (void (*callback)(void*), void* data, int32_t block, void* stream), {
      auto& on = stream_of(stream);
      check(callback != nullptr, kInvalidParam, "the callback is null");
      uint64_t thread;
      {
        std::lock_guard lock(reports().mutex);
        const auto at = reports().subscribed.find(on.id);
        check(at != reports().subscribed.end(), static_cast<Status>(107015),
            "no thread subscribed for the stream's callbacks (aclrtSubscribeReport)");
        thread = at->second;
      }
      Task task{"aclrtLaunchCallback",
          [callback, data, block, thread] {
            Report report{callback, data, std::make_shared<std::atomic<bool>>(false)};
            std::unique_lock lock(reports().mutex);
            reports().pending[thread].push_back(report);
            reports().changed.notify_all();
            if (block == 0) return;
            while (!reports().changed.wait_for(
                lock, std::chrono::milliseconds(50), [&] { return report.done->load(); }))
              check_not_aborted();
          },
          Kind::host};
      task.blocks = true;
      on.submit(std::move(task));
    })
ACL_API(computed, aclrtProcessReport, (int32_t milliseconds), {
  const auto thread = static_cast<uint64_t>(pthread_self());
  std::unique_lock lock(reports().mutex);
  const auto any = [&] { return !reports().pending[thread].empty(); };
  if (milliseconds < 0) reports().changed.wait(lock, any);
  else
    check(reports().changed.wait_for(lock, std::chrono::milliseconds(milliseconds), any),
        kReportTimeout, "no callback within ", milliseconds, " ms");
  const auto report = reports().pending[thread].front();
  reports().pending[thread].pop_front();
  lock.unlock();
  report.call(report.data);
  lock.lock();
  *report.done = true;
  reports().changed.notify_all();
})

// IPC events. Exporting a handle waits for the event, so that it is complete wherever it is opened;
// torch_npu exports it right after the record (torch_npu/csrc/ipc/StorageSharing.cpp, BSD).
namespace {
struct IpcHandle {
  char text[64];
};
constexpr char kIpcEvent[] = "ascend-emulator-event";
}  // namespace
ACL_API(computed, aclrtIpcGetEventHandle, (void* handle, char* text), {
  const auto event = event_at(handle);
  check_capture_mode("aclrtIpcGetEventHandle");
  if (const auto mark = mark_of(*event)) mark->stream->wait(mark->ticket);
  event->flags |= kExported;
  std::memcpy(text, kIpcEvent, sizeof kIpcEvent);
})
ACL_API(computed, aclrtIpcOpenEventHandle, (IpcHandle handle, void** event), {
  check(std::memcmp(handle.text, kIpcEvent, sizeof kIpcEvent) == 0, kInvalidParam,
      "not a handle of aclrtIpcGetEventHandle");
  create_event(event, 0);
})
