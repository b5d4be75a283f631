// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Interface of libatb.so for torch_npu's libop_plugin_atb.so. Some operators are C functions,
// looked up by name (ATB_OPERATOR below); the others are created from a parameter struct by C++
// functions: CreateOperation returns an atb::Operation, whose Setup checks the tensors and whose
// Execute submits the computation.
//
// The C++ names are the wheel's undefined symbols. Struct layouts and vtable slots were determined
// from the published wheel: its machine code, and the bytes that it passes for known arguments.
// Member names and the order of arguments are from the call sites in op-plugin's op_plugin/ops/atb
// and op_plugin/utils/custom_functions/atb (BSD).
#pragma once
#include <atomic>
#include <mutex>
#include <thread>

#include "operator/op.h"

#define ATB_EXPORT __attribute__((visibility("default")))

namespace atb {

struct Tensor {
  int32_t dtype = -1, format = 0;
  int64_t dims[8] = {};
  uint64_t rank = 0;
  void *device = nullptr, *host = nullptr;
  uint64_t bytes = 0;
};
static_assert(sizeof(Tensor) == 0x68);

struct Tensors {
  uint64_t capacity, size;
  Tensor inline_items[65];
  Tensor* heap_items;  // instead of inline_items if there are more
  const Tensor* begin() const { return heap_items ? heap_items : inline_items; }
  const Tensor* end() const { return begin() + size; }
};
static_assert(sizeof(Tensors) == 0x1a80);

struct VariantPack {
  Tensors in, out;
};

class Context {
 public:
  virtual ~Context() = default;
  virtual int SetExecuteStream(void* stream) {
    this->stream = stream;
    return 0;
  }
  std::atomic<void*> stream{nullptr};  // the queue threads of all NPUs set it
};

}  // namespace atb

// What CreateOperation gets.
namespace atb::infer {

struct PagedAttentionParam {
  int32_t heads;
  float scale;
  int32_t groups, mask_type;
  bool batch_run_status;
  int32_t quant_type, out_type;
  bool has_quant_offset;
  int32_t compress_type, calc_type, scale_type, layout;
  uint32_t latent_values;
};
struct SelfAttentionParam {
  int32_t quant_type, out_type, heads, groups;
  float query_scale, scale;
  bool batch_run_status;
  uint32_t triangular;
  int32_t calc_type, kernel_type, clamp_type;
  float clamp_least, clamp_most;
  int32_t mask_type;
};
struct GroupTopkParam {
  int32_t groups, kept;
  uint16_t by_sum, summed;
};
struct ReshapeAndCacheParam {
  int32_t compress_type, config;
};
struct LinearParam {
  bool transpose_left, transpose_right, has_bias;
  int32_t out_type;
  bool accumulates;
};
struct ElewiseParam {
  int32_t type;
};
struct RmsNormParam {
  int32_t layer_type, not_used;
  int32_t quant_type;
  float epsilon;
};
struct RopeParam {
  int32_t coefficient;
};

}  // namespace atb::infer

namespace emu::transformer {

struct AtbTensor {
  Tensor value;  // undefined if absent
  int32_t format;
};
using Arguments = std::vector<AtbTensor>;
using Prepare = std::function<Computation(const Arguments& in, const Arguments& out)>;

// Sequence lengths in host or device memory. Host memory is read at the call.
struct Lengths {
  Tensor value;
  Ints operator()() const;  // in the computation
};
Tensor host_values(const aclTensor* tensor);  // copies host memory (operator/tensor.cpp)

}  // namespace emu::transformer

namespace atb {

// Operator with its parameters. One object is set up for each call, possibly on several threads.
class Operation {
 public:
  Operation(const char* name, const char* inputs, size_t least, size_t most,
      emu::transformer::Prepare prepare)
      : name_(name), inputs_(inputs), least_(least), most_(most), prepare_(std::move(prepare)) {}
  explicit Operation(const char* name) : name_(name) {}
  virtual ~Operation();
  virtual std::string GetName()
      const;  // torch_npu puts it into the error of a failed Setup, so it contains the reason
  virtual int NotCalled0() { return emu::refuse(name_); }
  virtual int NotCalled1() { return emu::refuse(name_); }
  virtual int NotCalled2() { return emu::refuse(name_); }
  virtual int Setup(const VariantPack& pack, uint64_t& bytes, Context* context);
  virtual int Execute(const VariantPack&, uint8_t*, uint64_t, Context*) { return launch(); }

  void set_pending(aclOpExecutor* executor, void* stream);
  int launch();

 private:
  struct PendingLaunch {
    std::thread::id thread;
    int npu;
    aclOpExecutor* executor;
    void* stream;
  };
  const char *name_, *inputs_ = "";
  size_t least_ = 0, most_ = 0;
  emu::transformer::Prepare prepare_;
  mutable std::mutex mutex_;
  std::vector<PendingLaunch> pending_;
  std::string reason_;
};

}  // namespace atb

namespace emu {

template <> struct Arg<transformer::Lengths> {
  using C = const aclTensor*;
  static transformer::Lengths get(C tensor) { return {transformer::host_values(tensor)}; }
};

template <auto Body, class Name> struct AtbOperator;
template <class... Params, Computation (*Body)(Params...), class Name>
struct AtbOperator<Body, Name> {
  static int workspace(typename Arg<Params>::C... args, uint64_t* bytes, atb::Operation** operation,
      atb::Context* context) {
    aclOpExecutor* executor = nullptr;
    if (!operation || !context)
      return fail(kOpNull, text(Name::text, ": operation or context is null"));
    const int status = Operator<Body, Name>::workspace(args..., bytes, &executor);
    if (!*operation) *operation = new atb::Operation(Name::text);
    (*operation)->set_pending(executor, context->stream);
    return status;
  }
};

}  // namespace emu

// Operator with C functions, like CHECKED in operator/op.h.
#define ATB_OPERATOR(NAME, PARAMS, ...)                                                            \
  OPERATOR_BODY(Computation, false, nullptr, NAME, PARAMS, __VA_ARGS__)                            \
  RESOLVED(NAME##GetWorkspaceSize,                                                                 \
      emu::AtbOperator<&emu::ops::body_##NAME, emu::ops::name_##NAME>::workspace)                  \
  EXPORT int NAME(void*, uint64_t, atb::Operation* operation, atb::Context*) {                     \
    return operation ? operation->launch() : emu::fail(emu::kOpNull, #NAME ": operation is null"); \
  }

// Operator created from a parameter struct `p`, an atb::infer::NAME##Param. The body has `in` and
// `out`, and checks and computes as that of CHECKED.
#define ATB_PARAMETERS(NAME, LEAST, MOST, INPUTS, ...)                                             \
  static const emu::Registration registration_##NAME{"atb::" #NAME, emu::computed, __FILE__};      \
  namespace emu::ops {                                                                             \
  static Computation prepared_##NAME(const atb::infer::NAME##Param& p,                             \
      const transformer::Arguments& in, const transformer::Arguments& out) __VA_ARGS__             \
  }                                                                                                \
  namespace atb {                                                                                  \
  template <class Param> int CreateOperation(const Param&, Operation**);                           \
  template <> ATB_EXPORT int CreateOperation(const infer::NAME##Param& p, Operation** operation) { \
    *operation = new Operation("atb::" #NAME, INPUTS, LEAST, MOST,                                 \
        [p](const auto& in, const auto& out) { return emu::ops::prepared_##NAME(p, in, out); });   \
    return 0;                                                                                      \
  }                                                                                                \
  }
