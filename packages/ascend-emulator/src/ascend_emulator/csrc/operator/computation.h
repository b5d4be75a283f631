// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// What an operator runs on the stream, and the executor that torch_npu gets for it.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "core/recheck.h"
#include "tensor.h"

namespace emu {

// What to do if the operator that this thread prepares fails on its stream: the other ranks must
// learn of it.
using OnFailure = std::function<void(const std::string& reason)>;
void on_failure(OnFailure failed);
// The workspace of the operator that this thread prepares depends on the keys of its longest
// request.
void workspace_for_keys(int64_t keys);

// Callable that an operator executes on the stream. A computation may modify its captures and a
// replayed graph executes it again, so each execution calls a copy, unless the callable is const.
class Computation {
 public:
  Computation() = default;
  template <class Function,
      class = std::enable_if_t<!std::is_same_v<std::decay_t<Function>, Computation>>>
  Computation(Function function)
      : function_(new Function(std::move(function)),
            [](void* held) { delete static_cast<Function*>(held); }),
        run_([](void* held) {
          const auto& function = *static_cast<const Function*>(held);
          if constexpr (std::is_invocable_v<const Function&>) {
            function();
          } else {
            Function copy(function);
            copy();
          }
        }) {}
  void operator()() const { run_(function_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> function_{nullptr, [](void*) {}};
  void (*run_)(void*) = [](void*) {};
};

}  // namespace emu

struct aclOpExecutor {
  emu::Computation compute;
  std::vector<at::Tensor> tensors;        // in the order of the arguments, outputs last
  emu::Recheck memory{};                  // of these tensors
  const char* parameters = "";            // as in the source
  c10::SmallVector<uint16_t, 16> ends{};  // number of tensors up to and including each parameter
  bool reports_shape =
      false;           // the caller reads an output's shape as soon as the operator is launched
  bool hangs = false;  // injected fault
  bool communicates = false;             // facts.h
  std::vector<emu::Fractal> fractals{};  // unpacked before each execution
  emu::OnFailure failed{};               // of an operator that communicates
  uint64_t workspace = 0;                // bytes
  int64_t keys = 0;  // of the longest request, where the workspace depends on it
  void run() const {
    for (const auto& each : fractals) each.unpack();
    compute();
  }
};
