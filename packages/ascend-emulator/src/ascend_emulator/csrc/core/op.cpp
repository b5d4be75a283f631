#include "op.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "stream.h"

namespace emu {
namespace {

// ASCEND_EMULATOR_TRACE=FILE: the name of each operator that computes is added to the file, once a process.
void trace(const char* name) {
  static const char* path = std::getenv("ASCEND_EMULATOR_TRACE");
  if (!path) return;
  static std::mutex mutex;
  static std::set<std::string> seen;
  std::lock_guard lock(mutex);
  if (!seen.insert(name).second) return;
  static const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  const auto line = text(name, "\n");
  if (write(file, line.data(), line.size()) < 0) seen.erase(name);
}

// ATen gives an output of another shape than the result's a new one, with no more than a warning: torch_npu would not see the result.
struct NoResize : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    check(warning.msg().find("was resized") == std::string::npos, kOpFailed, "the output has the wrong shape: ", warning.msg());
    c10::WarningHandler::process(warning);
  }
};

}  // namespace

int launch(const char* name, aclOpExecutor* executor, void* stream) {
  if (!executor) {
    // The workspace phase failed, perhaps on another thread, and some callers do not look at its status.
    return removed(name) ? refuse(name) : operator_done(name, fail(kOpParam, text(name, ": its arguments were refused")));
  }
  const std::unique_ptr<aclOpExecutor> owned(executor);
  return operator_done(name, guarded(name, [&] {
    at::AutoDispatchBelowADInplaceOrView kernels_only;
    NoResize no_resize;
    c10::WarningUtils::WarningHandlerGuard guard(&no_resize);
    stream_of(stream).submit([&] { executor->compute(); });
    trace(name);
  }));
}

void Result::assign(const Tensor& value) const {
  check(tensor != nullptr, kOpParam, "a required output is null");
  const auto shape = value.sizes();
  check(value.numel() <= tensor->value.numel(), kOpFailed, "the result has ", value.numel(), " elements, the output holds ",
        tensor->value.numel());
  tensor->value.view(-1).narrow(0, 0, value.numel()).copy_(value.reshape(-1));
  tensor->result_shape = shape.vec();
  tensor->has_result_shape = true;
}

}  // namespace emu

EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return emu::kOk;
}
static const emu::Registration registration_aclDestroyAclOpExecutor{"aclDestroyAclOpExecutor", emu::State::bookkeeping, __FILE__};
