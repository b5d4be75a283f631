// Streams, events and synchronisation. Signatures: see device.cpp.
#include "../core/stream.h"

#include "../core/registry.h"

using namespace emu;

namespace emu {
namespace {
std::atomic<int> next_stream_id{0};
}

Stream::Stream(int device) : device(device), id(next_stream_id++) {}

Stream& stream_of(void* handle) {
  if (handle) return *static_cast<Stream*>(handle);
  static std::mutex mutex;
  static std::map<int, Stream*> defaults;
  std::lock_guard lock(mutex);
  auto*& stream = defaults[current_device()];
  if (!stream) stream = new Stream(current_device());
  return *stream;
}

namespace {
Event& event_of(void* handle) {
  check(handle != nullptr, kInvalidParam, "the event is null");
  return *static_cast<Event*>(handle);
}

using Clock = std::chrono::steady_clock;
}  // namespace
}  // namespace emu

ACL_API(bookkeeping, aclrtCreateStream, (void** stream), { *stream = new Stream(current_device()); })
ACL_API(bookkeeping, aclrtCreateStreamWithConfig, (void** stream, uint32_t, uint32_t), { *stream = new Stream(current_device()); })
ACL_API(bookkeeping, aclrtDestroyStream, (void* stream), { delete static_cast<Stream*>(stream); })
ACL_API(bookkeeping, aclrtDestroyStreamForce, (void* stream), { delete static_cast<Stream*>(stream); })
ACL_API(bookkeeping, aclrtStreamGetId, (void* stream, int32_t* id), { *id = stream_of(stream).id; })
ACL_API(bookkeeping, aclrtSetStreamFailureMode, (void*, uint64_t), {})
// Overflow is never watched for: results keep infinities (aclGetCannAttribute), where nobody needs it.
ACL_API(bookkeeping, aclrtSetStreamOverflowSwitch, (void*, uint32_t on), { check(on == 0, kUnsupported, "overflow detection is not emulated"); })
ACL_API(bookkeeping, aclrtGetStreamOverflowSwitch, (void*, uint32_t* on), { *on = 0; })
// aclrtStreamStatus: 0 complete, 1 not ready.
ACL_API(computed, aclrtStreamQuery, (void* stream, int32_t* status), { *status = stream_of(stream).idle() ? 0 : 1; })
ACL_API(computed, aclrtSynchronizeStream, (void* stream), { stream_of(stream).synchronize(); })
ACL_API(computed, aclrtSynchronizeStreamWithTimeout, (void* stream, int32_t), { stream_of(stream).synchronize(); })
ACL_API(computed, aclrtSynchronizeDevice, (), { stream_of(nullptr).synchronize(); })
ACL_API(computed, aclrtSynchronizeDeviceWithTimeout, (int32_t), { stream_of(nullptr).synchronize(); })

ACL_API(bookkeeping, aclrtCreateEventWithFlag, (void** event, uint32_t), { *event = new Event; })
ACL_API(bookkeeping, aclrtCreateEventExWithFlag, (void** event, uint32_t), { *event = new Event; })
ACL_API(bookkeeping, aclrtDestroyEvent, (void* event), { delete static_cast<Event*>(event); })
ACL_API(computed, aclrtRecordEvent, (void* event, void* stream), {
  stream_of(stream).submit([&] {
    event_of(event).time = Clock::now();
    event_of(event).recorded = true;
  });
})
ACL_API(computed, aclrtResetEvent, (void* event, void*), { event_of(event).recorded = false; })
ACL_API(computed, aclrtStreamWaitEvent, (void*, void* event), { event_of(event); })
ACL_API(computed, aclrtSynchronizeEvent, (void* event), {
  event_of(event);
  check_queue();
})
// aclrtEventRecordedStatus: 0 not ready, 1 complete. An event that was never recorded counts as complete (torch.npu.Event.query).
ACL_API(computed, aclrtQueryEventStatus, (void* event, int32_t* status), {
  event_of(event);
  *status = 1;
})
ACL_API(computed, aclrtQueryEventWaitStatus, (void* event, int32_t* status), {
  event_of(event);
  *status = 0;
})
ACL_API(computed, aclrtEventElapsedTime, (float* milliseconds, void* start, void* end), {
  const auto& from = event_of(start);
  const auto& to = event_of(end);
  check(from.recorded && to.recorded, kInvalidParam, "both events must have been recorded");
  *milliseconds = std::chrono::duration<float, std::milli>(to.time - from.time).count();
})
ACL_API(computed, aclrtEventGetTimestamp, (void* event, uint64_t* microseconds), {
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(event_of(event).time.time_since_epoch()).count();
})

// Host callbacks arrive through a report thread that torch_npu starts for each subscribed stream.
ACL_API(computed, aclrtLaunchCallback, (void (*callback)(void*), void* data, int32_t, void* stream), {
  stream_of(stream).submit([&] { callback(data); });
})
ACL_API(computed, aclrtLaunchHostFunc, (void* stream, void (*callback)(void*), void* data), {
  stream_of(stream).submit([&] { callback(data); });
})
ACL_API(bookkeeping, aclrtSubscribeReport, (uint64_t, void*), {})
ACL_API(bookkeeping, aclrtUnSubscribeReport, (uint64_t, void*), {})
ACL_API(bookkeeping, aclrtProcessReport, (int32_t), {})
