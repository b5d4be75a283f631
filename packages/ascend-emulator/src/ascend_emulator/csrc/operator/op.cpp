// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "op.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>
#include <unordered_set>
#include <utility>

#include "core/fault.h"
#include "core/hash.h"
#include "core/jitter.h"
#include "core/laws.h"
#include "core/stream.h"
#include "core/trace.h"
#include "compile_options.h"
#include "jitter.h"

namespace emu {
namespace {

// ATen resizes an output of the wrong shape with only a warning; torch_npu would not see the
// result.
struct NoResize : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    check(warning.msg().find("was resized") == std::string::npos, kOpFailed,
        "the output has the wrong shape: ", warning.msg());
    c10::WarningHandler::process(warning);
  }
};

// "self", or "tensors[2]" of a list.
std::string argument(const aclOpExecutor& executor, size_t tensor) {
  const auto end = std::find_if(
      executor.ends.begin(), executor.ends.end(), [&](size_t each) { return each > tensor; });
  if (end == executor.ends.end()) return text("tensor ", tensor);
  const size_t first = end == executor.ends.begin() ? 0 : *(end - 1);
  const auto name = nth(executor.parameters, end - executor.ends.begin());
  return *end - first == 1 ? name : text(name, "[", tensor - first, "]");
}

// The output of a matmul, behind which some have what they gathered.
const Tensor& output_of(const char* name, const aclOpExecutor& executor) {
  const auto& tensors = executor.tensors;
  if (std::string_view(name).starts_with("aclnnInplace")) return tensors.front();
  for (size_t i = 0; i < tensors.size(); ++i)
    if (const auto found = argument(executor, i); found == "out" || found == "y") return tensors[i];
  return tensors.back();
}

// FLOPs of a matrix product: 2 * output elements * length of the sum.
Work work_of(const char* name, const aclOpExecutor& executor) {
  const auto& tensors = executor.tensors;
  Work work;
  std::ostringstream shapes;
  const Tensor* matrices[2] = {nullptr, nullptr};
  int seen = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    work.bytes += static_cast<double>(tensor.nbytes());
    shapes << (seen ? " " : "") << tensor.scalar_type() << tensor.sizes();
    if (seen < 2) matrices[seen] = &tensor;
    ++seen;
  }
  work.shapes = shapes.str();
  const auto rows = [](const Tensor& of) {
    return of.dim() && of.size(-1) ? static_cast<double>(of.numel() / of.size(-1)) : 1.0;
  };
  work.rule = laws::rule_of(name, seen ? toString(matrices[0]->scalar_type()) : "");
  if (seen) work.first = static_cast<double>(matrices[0]->numel()), work.rows = rows(*matrices[0]);
  const Cost cost = facts_of(name).cost;
  if (seen > 1 && cost != Cost::elements) {
    const Tensor& left = *matrices[cost == Cost::matmul_and_addend];
    if (left.dim() > 0) {
      work.flops = 2.0 * static_cast<double>(output_of(name, executor).numel()) *
                   static_cast<double>(left.size(-1));
      work.item = static_cast<int>(left.element_size());
      work.rows = rows(left);
      // Of each group, where the matrices of groups are one tensor, of 5 dimensions in FRACTAL_NZ.
      if (cost == Cost::grouped_matmul && (matrices[1]->dim() == 3 || matrices[1]->dim() == 5))
        work.rows /= static_cast<double>(std::max<int64_t>(matrices[1]->size(0), 1));
    }
  } else {
    work.flops = tensors.empty() || !tensors.back().defined()
                     ? 0
                     : static_cast<double>(tensors.back().numel());
  }
  return work;
}

// ATen's state of a thread that computes: only kernels, without the state of the operator's caller
// (inference mode, a profiler, dispatch modes of Python).
class KernelState {
  static c10::impl::LocalDispatchKeySet kernels() {
    c10::impl::LocalDispatchKeySet keys{c10::impl::PODLocalDispatchKeySet{}};
    keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }
  c10::InferenceMode normal_{false};
  at::DisableRecordFunctionGuard unobserved_;
  c10::impl::ForceDispatchKeyGuard kernels_only_{kernels()};
  NoResize no_resize_;
  c10::WarningUtils::WarningHandlerGuard handler_{&no_resize_};
};

// Whether the operator takes less time than waking another thread.
bool is_brief(const std::vector<Tensor>& tensors) {
  constexpr size_t kMostBytes = 32 << 10;
  size_t bytes = 0;
  for (const auto& tensor : tensors)
    if (tensor.defined()) bytes += tensor.nbytes();
  return bytes <= kMostBytes;
}

}  // namespace

void prepare_worker() {
  static thread_local std::optional<KernelState> state;
  state.emplace();
}

const char* with_fields(const char* parameters, std::initializer_list<const char*> fields) {
  auto* out = new std::string;  // once for an operator
  int64_t position = 0;
  for (const char* names : fields) {
    if (position) *out += ", ";
    *out += names ? names : nth(parameters, position);
    ++position;
  }
  return out->c_str();
}

namespace {
thread_local OnFailure claimed;
thread_local int64_t claimed_keys = 0;

// Executors that were made and neither launched nor destroyed: each is launched once.
std::mutex executors_mutex;
std::unordered_set<const aclOpExecutor*> executors;
bool take_back(const aclOpExecutor* executor) {
  std::lock_guard lock(executors_mutex);
  return executors.erase(executor) > 0;
}
}  // namespace

void on_failure(OnFailure failed) { claimed = std::move(failed); }
void workspace_for_keys(int64_t keys) { claimed_keys = keys; }

aclOpExecutor* hand_out(std::unique_ptr<aclOpExecutor> made) {
  std::lock_guard lock(executors_mutex);
  executors.insert(made.get());
  return made.release();
}

bool discard(aclOpExecutor* executor) {
  if (!take_back(executor)) return false;
  delete executor;
  return true;
}

namespace {
void recheck(const aclOpExecutor& executor) {
  executor.memory.verify([&] {
    for (size_t i = 0; i < executor.tensors.size(); ++i) {
      if (!executor.tensors[i].defined()) continue;
      const auto& storage = executor.tensors[i].storage();
      const void* address = device_address(storage.data());
      if (is_device(address) && storage.nbytes())
        executor.memory.check([&] { return argument(executor, i); }, address, storage.nbytes());
    }
  });
}
}  // namespace

namespace {
// A captured call has the workspace that was made for its first sequence lengths, and an update
// gives it others. torch_npu makes it of as many elements of the query's type as CANN asks for
// bytes (op-plugin's FusedInferAttentionScoreKernelNpuOpApi.cpp); that margin is none by design.
void check_workspace(const aclOpExecutor& executor, uint64_t given) {
  if (!executor.keys || given == executor.workspace) return;
  const uint64_t asked = given / executor.tensors.front().element_size(),
                 others = executor.workspace - workspace_of_keys(executor.keys);
  rule("attention_workspace.keys", asked >= executor.workspace, "a request has ", executor.keys,
      " keys, and the workspace was made for ",
      asked > others ? keys_of_workspace(asked - others) : 0,
      ": get_max_workspace must have the longest sequences of later updates");
}
}  // namespace

int launch(const char* name, aclOpExecutor* executor, void* stream, uint64_t given) {
  if (!executor) {
    // GetWorkspaceSize failed, perhaps on another thread, and some callers ignore its status.
    return removed(name)
               ? refuse(name)
               : operator_done(name, fail(kOpParam, text(name, ": its arguments were refused")));
  }
  if (!take_back(executor))
    return operator_done(
        name, fail(kOpParam,
                  text(name, ": the executor was launched or destroyed before, or never made")));
  std::shared_ptr<aclOpExecutor> owned(executor);
  return operator_done(name, guarded(name, [&] {
    const auto on = stream_at(stream);
    check_workspace(*owned, given);
    if (null_mode() && !owned->reports_shape) return;
    Task task{name, [owned, name] {
                try {
                  recheck(*owned);
                  owned->run();
                  if (jitter::on) [[unlikely]]
                    jitter::move_results(name, owned->parameters, owned->ends, owned->tensors);
                } catch (const std::exception& error) {
                  if (owned->failed) owned->failed(text(name, ": ", error_of(error).what()));
                  throw;
                }
                note(name);
              }};
    if (owned->hangs) task.run = hang;
    task.blocks = owned->communicates;
    task.brief =
        !task.blocks && !owned->hangs && on->device == current_device() && is_brief(owned->tensors);
    if (trace_enabled()) {
      task.work = work_of(name, *owned);
      if (compiles_at_run_time()) host_compiles(name, task.work.shapes);
    }
    const bool at_once = owned->reports_shape;
    if (at_once)
      check(!on->capture, kStreamCaptured,
          "its result's shape depends on values, so that it cannot be captured");
    owned.reset();
    std::optional<KernelState> state;
    if (task.brief) state.emplace();
    const auto ticket = on->submit(std::move(task));
    if (at_once) on->wait(ticket);
  }));
}

void ArgumentReader::collect(const Tensor& value) {
  tensors_.push_back(value);
  signature_.add(value);
}
void ArgumentReader::collect(const Opt<Tensor>& value) { collect(value.value_or(Tensor())); }
void ArgumentReader::collect(const Tensors& value) {
  for (const auto& each : value) collect(each);
  signature_.mix(value.size());
}
void ArgumentReader::collect(const Result& value) {
  if (value.tensor) collect(value.tensor->value);
}
void ArgumentReader::collect(const Ints& values) {
  for (const auto value : values) {
    signature_.add(value);
    signature_.mix(static_cast<uint64_t>(value));
  }
  signature_.mix(values.size());
}
void ArgumentReader::collect(const Text& value) {
  for (const auto each : value) signature_.mix(static_cast<uint64_t>(each));
  signature_.mix(value.size());
}

void ArgumentReader::collect(const Stored& value) {
  collect(value.storage.defined() ? value.storage : value.value);
}
void ArgumentReader::collect(const Weight& value) {
  collect(value.storage.defined() ? value.storage : static_cast<Tensor>(value));
}
void ArgumentReader::collect(const Weights& value) { collect(value.storages); }

void ArgumentReader::unpack(Weight& taken, const aclTensor* given) {
  if (!taken.storage.defined()) return;
  static_cast<Tensor&>(taken) = matrix_of(name(), *given);
  executor_.fractals.push_back({taken.storage, taken});
}

void ArgumentReader::unpack(Weights& taken, const aclTensorList* given) {
  for (size_t i = 0; i < taken.size(); ++i) {
    const auto* tensor = given->items[i];
    const bool fractal = tensor && tensor->storage.defined();
    if (fractal) {
      taken[i] = matrix_of(text(name(), "[", i, "]"), *tensor);
      executor_.fractals.push_back({tensor->storage, taken[i]});
    }
    taken.storages.push_back(fractal ? tensor->storage : taken[i]);
  }
}

// "数据格式支持ND" of each operator's page in CANN's API reference; torch_npu casts or refuses
// before most calls.
void ArgumentReader::refuse_fractal(const aclTensor* given) const {
  if (given && given->storage.defined())
    raise(kOpParam,
        {name(), " is in FRACTAL_NZ; this operator reads ND: npu_format_cast(tensor, 2)"});
}
void ArgumentReader::refuse_fractal(const aclTensorList* given) const {
  if (given)
    for (const auto* item : given->items) refuse_fractal(item);
}

const OperatorFacts& OperatorInfo::facts() {
  const auto* known = known_facts.load(std::memory_order_relaxed);
  if (!known) known_facts.store(known = &facts_of(name), std::memory_order_relaxed);
  return *known;
}

// A hash of all that dtype checks and rules read. 0: the plain matrix of a weight is not in it, or
// each break of an allowed rule counts.
uint64_t ArgumentReader::key() const {
  if (allowed_rules || !executor_.fractals.empty()) return 0;
  auto key = signature_.hash();
  for (const auto& [position, value] : integers_)
    key = hash(key, {position, static_cast<uint64_t>(value)});
  return key;
}

void ArgumentReader::check() const {
  const auto called_with = key();  // the layers of a step call an operator with the same
  if (called_with && info_.accepted.load(std::memory_order_relaxed) == called_with) return;
  // A3 refuses complex32 in every operator of PyTorch's tests but complex(): add, clone, fill,
  // zeros, eq, cat, where, index_put (Ascend/pytorch, ci-test, skip_list.json at 52087f69e).
  const bool half = std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == at::kComplexHalf;
  });
  emu::require(!half || std::string_view(info_.name) == "aclnnComplex", "a tensor is ",
      at::kComplexHalf, "; only aclnnComplex takes it");
  // The rule is about the first argument that is a tensor: arange and eye have only their output.
  DTypeSet allowed = info_.facts().dtypes;
  size_t first = 0;
  for (size_t position = 0; position < ends_.size(); ++position) {
    check_dtypes(
        tensors_, first, ends_[position], allowed, info_.parameters, static_cast<int>(position));
    first = ends_[position];
    if (first) allowed = 0;
  }
  check_rules();
  info_.accepted.store(called_with, std::memory_order_relaxed);
}

int prepare(OperatorInfo& info, c10::function_ref<Computation(ArgumentReader&)> take,
    uint64_t* bytes, aclOpExecutor** executor) {
  // ACLNN_ERR_PARAM_NULLPTR
  if (!bytes || !executor)
    return operator_done(
        info.name, fail(kOpNull, text(info.name, ": workspaceSize or executor is null")));
  *bytes = 0;
  *executor = nullptr;
  return operator_done(info.name, intercepted(info.name, [&] {
    auto made = std::make_unique<aclOpExecutor>();
    made->parameters = info.parameters;
    ArgumentReader reader(info, *made);
    claimed = nullptr;
    claimed_keys = 0;
    made->compute = take(reader);
    made->failed = std::exchange(claimed, nullptr);
    made->reports_shape = info.reports_shape;
    const auto& facts = info.facts();
    made->communicates = facts.communicates;
    made->keys = claimed_keys;
    made->workspace = *bytes =
        workspace_bytes(facts, made->tensors) + workspace_of_keys(made->keys);
    if (fault::armed()) made->hangs = fault::pending() == fault::Kind::hang;
    *executor = hand_out(std::move(made));
  }));
}

int workspace(OperatorInfo& info, const ParameterList<ParameterType>& parameters,
    const Bodies& bodies, const Raw* arguments, uint64_t* bytes, aclOpExecutor** executor) {
  return prepare(
      info,
      [&](ArgumentReader& reader) -> Computation {
        ParameterValues<ParameterType> values(parameters);
        values.make(
            [&](const ParameterType& type, void* at, size_t) { type.take(reader, arguments, at); });
        reader.check();
        if (bodies.returns_computation) return values.call(bodies.body);
        if (bodies.checks) values.call(bodies.checks);
        if (bodies.dry_run) {  // of a signature that is seen for the first time
          try_out(reader.signature(), reader.tensors(), [&](StandIns& stand_ins) {
            ParameterValues<ParameterType> small(parameters);
            small.make([&](const ParameterType& type, void* at, size_t index) {
              type.stand_in(stand_ins, values[index], at);
            });
            if (bodies.checks) small.call(bodies.checks);
            small.call(bodies.body);
          });
        }
        return [body = bodies.body, values = std::move(values)] { values.call(body); };
      },
      bytes, executor);
}

void Result::assign(const Tensor& value) const {
  require(tensor != nullptr, "a required output is null");
  const auto shape = value.sizes();
  check(value.numel() <= tensor->value.numel(), kOpFailed, "the result has ", value.numel(),
      " elements, the output holds ", tensor->value.numel());
  tensor->value.view(-1).narrow(0, 0, value.numel()).copy_(value.reshape(-1));
  tensor->result_shape = shape.vec();
  tensor->has_result_shape = true;
}

}  // namespace emu

ACL_API(keeps, aclDestroyAclOpExecutor, (aclOpExecutor * executor), {
  check(!executor || discard(executor), kInvalidParam,
      "the executor was launched or destroyed before, or never made");
})
