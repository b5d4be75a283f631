#include "op.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace emu {

int launch(const char* name, aclOpExecutor* executor, void* stream) {
  if (!executor) {
    // The workspace phase failed, perhaps on another thread, and some callers do not look at its status.
    return removed(name) ? refuse(name) : fail(kOpParam, text(name, ": its arguments were refused"));
  }
  const std::unique_ptr<aclOpExecutor> owned(executor);
  return guarded(name, [&] {
    at::AutoDispatchBelowADInplaceOrView kernels_only;
    stream_of(stream).submit([&] { executor->compute(); });
  });
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
