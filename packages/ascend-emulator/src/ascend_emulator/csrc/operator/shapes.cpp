// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "shapes.h"

#include <bitset>

namespace emu {
namespace {

// Broadcasts `other` into `shape`; false if they are incompatible.
bool broadcast_into(Shape& shape, at::IntArrayRef other) {
  if (other.size() > shape.size()) shape.insert(shape.begin(), other.size() - shape.size(), 1);
  for (size_t back = 1; back <= other.size(); ++back) {
    auto& size = shape[shape.size() - back];
    const auto other_size = other[other.size() - back];
    if (size == 1) size = other_size;
    else if (other_size != 1 && other_size != size) return false;
  }
  return true;
}

}  // namespace

int64_t real_dim(int64_t dim, int64_t dims, const char* argument) {
  const auto bound = std::max<int64_t>(dims, 1);
  require(dim >= -bound && dim < bound, argument, " is ", dim, "; allowed: ", -bound, " to ",
      bound - 1);
  return dim < 0 ? dim + bound : dim;
}

void broadcasts(const char* names, TensorRefs tensors) {
  Shape shape;
  const auto first = tensors.begin();
  for (auto input = first + 1; input != tensors.end(); ++input) {
    const auto sizes = input->get().sizes();
    if (input == first + 1) shape = sizes;
    else if (const auto before = shape; !broadcast_into(shape, sizes))
      raise(
          kOpParam, {nth(names, input - first), " has shape ", sizes,
                        ", which does not broadcast with ", nth(names, 1),
                        input == first + 2 ? "'s " : " and the others' ", at::IntArrayRef(before)});
  }
  if (first->get().sizes() != at::IntArrayRef(shape))
    emu::shape(nth(names, 0).c_str(), *first, shape);
}

void expands(const char* names, TensorRefs tensors) {
  const auto target = tensors.begin()->get().sizes();
  for (auto source = tensors.begin() + 1; source != tensors.end(); ++source) {
    const auto sizes = source->get().sizes();
    if (sizes == target) continue;
    Shape shape(target);
    if (!broadcast_into(shape, sizes) || at::IntArrayRef(shape) != target)
      raise(kOpParam, {nth(names, source - tensors.begin()), " has shape ", sizes,
                          ", which does not expand to ", nth(names, 0), "'s ", target});
  }
}

void along(const char* out_name, const Tensor& out, const Tensor& self, int64_t dim) {
  real_dim(dim, self.dim());
  shape(out_name, out, self.sizes());
}

void reduced(const char* out_name, const Tensor& out, const Tensor& self, at::IntArrayRef dims,
    bool keepdim) {
  std::bitset<64> gone;
  if (dims.empty()) gone.set();
  for (const auto dim : dims) {
    const auto at = real_dim(dim, self.dim());
    require(!gone[at], "dim is ", dims, ", which has dimension ", at, " more than once");
    gone[at] = true;
  }
  Shape expected;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!gone[dim]) expected.push_back(self.size(dim));
    else if (keepdim) expected.push_back(1);
  }
  shape(out_name, out, expected);
}

Shape product(
    const char* names, const Tensor& self, const Tensor& other, int64_t least, int64_t most) {
  const auto a = self.sizes(), b = other.sizes();
  for (const auto* each : {&self, &other})
    if (each->dim() < least || each->dim() > most)
      rank(nth(names, each == &other).c_str(), *each, least, most);
  const auto inner = b.size() == 1 ? b[0] : b[b.size() - 2];
  if (a.back() != inner)
    raise(kOpParam, {nth(names, 1), " has shape ", b, ", where ", inner, " must be ", a.back(),
                        ", the last size of ", nth(names, 0), "'s ", a});
  Shape expected(a.slice(0, a.size() > 2 ? a.size() - 2 : 0));
  if (!broadcast_into(expected, b.slice(0, b.size() > 2 ? b.size() - 2 : 0)))
    raise(kOpParam,
        {nth(names, 1), " has shape ", b,
            ", whose first dimensions do not broadcast with those of ", nth(names, 0), "'s ", a});
  if (a.size() > 1) expected.push_back(a[a.size() - 2]);
  if (b.size() > 1) expected.push_back(b.back());
  return expected;
}

}  // namespace emu
