// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Contexts, tensors and operations of libatb.so; see atb.h.
#include "atb.h"

#include <c10/core/InferenceMode.h>

#include "core/fault.h"

namespace emu::transformer {
namespace {

AtbTensor view(const atb::Tensor& tensor, bool reads) {
  if (!tensor.device && !tensor.host && tensor.rank == 0) return {Tensor(), tensor.format};
  c10::InferenceMode off(false);  // as in aclCreateTensor
  const auto dtype = to_scalar_type(tensor.dtype);
  const at::IntArrayRef sizes(tensor.dims, tensor.rank);
  const auto bytes = static_cast<uint64_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  const auto options = at::TensorOptions().dtype(dtype);
  if (bytes == 0) return {at::empty(sizes, options), tensor.format};
  require(!tensor.host || (reads && dtype == at::kInt), "a tensor of ", dtype,
      " is in the host's memory, where only lengths, of Int, may be");
  if (tensor.host) return {at::from_blob(tensor.host, sizes, options).clone(), tensor.format};
  const auto place = locate(tensor.device, bytes);
  const int npu = current_device();
  require(place.npu == npu || place.npu == kNoNpu, "a tensor that is not in the memory of NPU ",
      npu, ", where the operator runs");
  return {at::from_blob(place.kernel, sizes, options), tensor.format};
}

}  // namespace

Ints Lengths::operator()() const {
  const auto all = value.to(at::kLong).contiguous();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

}  // namespace emu::transformer

namespace atb {

using namespace emu;

namespace {
int npu_of_thread() {
  try {
    return current_device();
  } catch (const Error&) { return kNoNpu; }  // the operator has failed, or will
}
}  // namespace

Operation::~Operation() {
  for (const auto& held : pending_) discard(held.executor);
}

std::string Operation::GetName() const {
  std::lock_guard lock(mutex_);
  return reason_.empty() ? name_ : reason_;
}

// Setup and Execute run on one thread, alternately. During a graph capture, Setup runs on the
// caller and Execute on the thread of its NPU's queue, in the same order: the caller may be several
// calls ahead.
void Operation::set_pending(aclOpExecutor* executor, void* stream) {
  if (!executor) return;  // the set-up failed
  std::lock_guard lock(mutex_);
  pending_.push_back({std::this_thread::get_id(), npu_of_thread(), executor, stream});
}

int Operation::launch() {
  PendingLaunch mine{{}, 0, nullptr, nullptr};
  {
    std::lock_guard lock(mutex_);
    const auto own = [self = std::this_thread::get_id()](
                         const PendingLaunch& held) { return held.thread == self; };
    const auto of_npu = [npu = npu_of_thread()](
                            const PendingLaunch& held) { return held.npu == npu; };
    if (const auto last = std::find_if(pending_.rbegin(), pending_.rend(), own);
        last != pending_.rend()) {
      mine = *last;
      pending_.erase(std::next(last).base());
      for (const auto& held : pending_)  // their Execute was never called
        if (own(held)) discard(held.executor);
      std::erase_if(pending_, own);
    } else if (const auto first = std::find_if(pending_.begin(), pending_.end(), of_npu);
        first != pending_.end()) {
      mine = *first;
      pending_.erase(first);
    }
  }
  return emu::launch(name_, mine.executor, mine.stream);
}

int Operation::Setup(const VariantPack& pack, uint64_t& bytes, Context* context) {
  bytes = 0;
  std::string reason;
  const int status = operator_done(name_, intercepted(name_, [&] {
    try {
      require(pack.in.size >= least_ && pack.in.size <= most_, pack.in.size, " input tensors; ",
          least_, " to ", most_, " are expected: this combination of arguments is not supported");
      auto made = std::make_unique<aclOpExecutor>();
      made->parameters = inputs_;
      emu::transformer::Arguments in, out;
      for (const auto& tensor : pack.in) {
        in.push_back(emu::transformer::view(tensor, true));
        made->tensors.push_back(in.back().value);
        made->ends.push_back(static_cast<uint16_t>(made->tensors.size()));
        emu::check_dtypes(made->tensors, made->tensors.size() - 1, made->tensors.size(), 0, inputs_,
            static_cast<int>(in.size()) - 1);
      }
      for (const auto& tensor : pack.out) {
        out.push_back(emu::transformer::view(tensor, false));
        made->tensors.push_back(out.back().value);
      }
      made->compute = prepare_(in, out);
      bytes = emu::workspace_bytes(emu::facts_of(name_), made->tensors);
      if (fault::armed()) made->hangs = fault::pending() == fault::Kind::hang;
      set_pending(hand_out(std::move(made)), context->stream);
    } catch (const std::exception& e) {
      reason = error_of(e).what();
      throw;
    }
  }));
  if (status != kOk) {
    std::lock_guard lock(mutex_);
    reason_ = text(name_, ": ", reason.empty() ? "taken out, or made to fail" : reason, ";");
  }
  return status;
}

ATB_EXPORT int CreateContext(Context** context) {
  *context = new Context;
  return 0;
}
ATB_EXPORT int DestroyContext(Context* context) {
  delete context;
  return 0;
}
ATB_EXPORT int DestroyOperation(Operation* operation) {
  delete operation;
  return 0;
}

struct ATB_EXPORT Utils {
  static uint64_t GetTensorSize(const Tensor& tensor);
};
uint64_t Utils::GetTensorSize(const Tensor& tensor) {
  uint64_t bytes = c10::elementSize(to_scalar_type(tensor.dtype));
  for (uint64_t i = 0; i < tensor.rank; ++i) bytes *= static_cast<uint64_t>(tensor.dims[i]);
  return bytes;
}

}  // namespace atb
