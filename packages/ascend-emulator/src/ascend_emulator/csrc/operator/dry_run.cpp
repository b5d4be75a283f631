// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "dry_run.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <cstring>
#include <numeric>

#include "core/cost.h"

namespace emu {
namespace {

constexpr int64_t kMostElements = 4096, kMostWholeElements = int64_t{1} << 25,
                  kMostUncutElements = int64_t{1} << 20;
constexpr int64_t kMostKeptAttribute = 16;  // Dimensions and such are no sizes.
std::array<std::atomic<uint64_t>, 8192> remembered;

int64_t storage_elements(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += std::max<int64_t>(tensor.size(dim) - 1, 0) * tensor.stride(dim);
  return last + 1;
}

// Says that ATen would resize an output; drops other warnings, which come again on the stream.
struct OutputsKeepTheirShape : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    const auto& message = warning.msg();
    require(message.find("resized") == std::string::npos,
        "an output has the wrong shape: ", message.substr(0, message.find(". ")));
  }
};

bool has_one_of(const std::string& message, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
      [&](const char* part) { return message.find(part) != std::string::npos; });
}

bool about_dtypes(const std::string& message) {
  return has_one_of(message, {"not implemented for '", "can't be cast", "dtype", "calar type",
                                 "data type", "bool", "Bool", "omplex", "nteger", "floating"});
}

// Errors of ATen about values: an index, a divisor of zero, a singular matrix, probabilities,
// counts; and exceptions of the AI CPU, which the stream reports.
constexpr int kAiCpu = 507018;  // its exceptions are reported when a stream is synchronized
bool about_values(const std::exception& error, const std::string& message) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  if (own && own->status == kAiCpu) return true;
  if (dynamic_cast<const c10::IndexError*>(&error) || dynamic_cast<const c10::LinAlgError*>(&error))
    return true;
  return has_one_of(message, {"ZeroDivisionError", "out of range", "out of bounds", "probabilit",
                                 "allocated size does not match"});
}

// ATen's refusal of the arguments that `body` gets, if it refuses them.
std::optional<Error> refusal(StandIns& stand_ins, c10::function_ref<void(StandIns&)> body) {
  using c10::DispatchKey;
  // The calling thread's modes (autograd, Python's dispatch, functorch) do not apply here.
  const c10::impl::ForceDispatchKeyGuard plain(c10::DispatchKeySet(DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
          c10::python_ks);
  OutputsKeepTheirShape warnings;
  const c10::WarningUtils::WarningHandlerGuard handler(&warnings);
  const cost::Scope uncounted(nullptr);
  try {
    body(stand_ins);
  } catch (const std::exception& error) {
    const auto found = error_of(error);
    const std::string message = found.what();
    if (!about_values(error, message))
      return Error(kOpParam, message.substr(0, message.find('\n')), found.classed);
  }
  return std::nullopt;
}

bool passed_before(uint64_t signature) {
  return remembered[signature % remembered.size()].load() == signature;
}
void passed(uint64_t signature) { remembered[signature % remembered.size()] = signature; }

}  // namespace

void Signature::add(const at::Tensor& tensor) {
  if (!tensor.defined()) return mix(~uint64_t{0});
  mix(static_cast<uint64_t>(tensor.scalar_type()) << 8 | static_cast<uint64_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) mix(static_cast<uint64_t>(size));
  for (const auto stride : tensor.strides()) mix(static_cast<uint64_t>(stride));
}

void Signature::add(const at::Scalar& scalar) {
  mix(static_cast<uint64_t>(scalar.type()));
  if (scalar.isIntegral(true)) add(scalar.to<int64_t>() < 0 ? int64_t{-1} : int64_t{1});
  else if (scalar.isFloatingPoint()) add(scalar.toDouble());
}

StandIns::StandIns(const std::vector<at::Tensor>& tensors) {
  const auto fit = [&] {
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return !tensor.defined() || elements(tensor) <= kMostElements;
    });
  };
  for (int64_t longest = 16; longest && !fit(); longest /= 2) {
    longest_ = longest;
    larger_.clear();
    for (const auto& tensor : tensors)
      if (tensor.defined())
        std::copy_if(tensor.sizes().begin(), tensor.sizes().end(), std::back_inserter(larger_),
            [&](int64_t size) { return size > longest; });
    std::sort(larger_.begin(), larger_.end());
    larger_.erase(std::unique(larger_.begin(), larger_.end()), larger_.end());
  }
}

int64_t StandIns::cut(int64_t size) const {
  const auto found = std::lower_bound(larger_.begin(), larger_.end(), size);
  return found == larger_.end() || *found != size ? size : longest_ + 1 + (found - larger_.begin());
}

int64_t StandIns::elements(const at::Tensor& tensor) const {
  int64_t product = 1;
  for (const auto size : tensor.sizes()) product *= cut(size);
  return product;
}

int64_t StandIns::of(int64_t attribute) const {
  return attribute > kMostKeptAttribute ? cut(attribute) : attribute;
}

std::vector<int64_t> StandIns::of(std::vector<int64_t> attributes) const {
  for (auto& each : attributes) each = of(each);
  return attributes;
}

at::Tensor StandIns::of(const at::Tensor& tensor) const {
  if (!tensor.defined()) return tensor;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  for (auto& size : sizes) size = cut(size);
  const auto options = tensor.options();
  const bool strided = exact() && storage_elements(tensor) <= kMostElements * 16;
  const int64_t count = strided ? storage_elements(tensor) : c10::multiply_integers(sizes);
  // As the argument itself (operator/tensor.cpp): it cannot be resized.
  const auto bytes = std::max<int64_t>(count, 1) * static_cast<int64_t>(tensor.element_size());
  void* memory = std::calloc(bytes, 1);
  const auto deleter = [memory](void*) { std::free(memory); };
  auto made = strided ? at::from_blob(memory, sizes, tensor.strides(), deleter, options)
                      : at::from_blob(memory, sizes, deleter, options);
  // Large ones remain zeros, so that their pages are not touched.
  if (tensor.is_floating_point() && count <= kMostElements * 16)
    at::from_blob(memory, {count}, options).fill_(1);
  return made;
}

void try_out(const Signature& signature, const std::vector<at::Tensor>& tensors,
    c10::function_ref<void(StandIns&)> body) {
  if (passed_before(signature.hash())) return;
  StandIns small(tensors), whole;
  const auto& large = signature.large_attributes();
  const bool fits = small.exact() || std::all_of(large.begin(), large.end(),
                                         [&](int64_t each) { return small.of(each) != each; });
  const auto at_most = [&](int64_t limit) {
    return std::accumulate(
               tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const at::Tensor& each) {
                 return sum + (each.defined() ? each.numel() : 0);
               }) <= limit;
  };
  std::optional<Error> refused;
  // A large attribute that no size equals has no stand-in: [4095] of a dimension of 4,096.
  if (!fits) {
    if (at_most(kMostUncutElements)) refused = refusal(whole, body);
  } else if (refused = refusal(small, body);
      refused && !small.exact() && !about_dtypes(refused->what())) {
    // A sum of sizes is not the sum of the cut ones, so whole stand-ins decide.
    refused = at_most(kMostWholeElements) ? refusal(whole, body) : std::nullopt;
  }
  if (refused) throw *refused;
  passed(signature.hash());
}

}  // namespace emu
