// Checks of an operator's arguments. Each refuses with the argument, what was found and what is allowed; the operator's name is put
// before it at the C boundary. Write the source of the rule beside the check.
#ifndef ASCEND_EMULATOR_CORE_CHECKS_H
#define ASCEND_EMULATOR_CORE_CHECKS_H
#include <ATen/ATen.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "device.h"
#include "status.h"

namespace emu {

using DTypes = std::vector<at::ScalarType>;
inline const DTypes kFloating{at::kFloat, at::kHalf, at::kBFloat16};
inline const DTypes kHalves{at::kHalf, at::kBFloat16};
inline const DTypes kIndices{at::kInt, at::kLong};

template <class Range>
std::string listed(const Range& values) {
  std::ostringstream out;
  const char* separator = "";
  for (const auto& value : values) {
    out << separator << value;
    separator = ", ";
  }
  return out.str();
}

// The dtype is one of these.
inline void one_of(const char* argument, const at::Tensor& tensor, const DTypes& allowed) {
  const auto found = tensor.scalar_type();
  check(std::find(allowed.begin(), allowed.end(), found) != allowed.end(), kOpParam, argument, " is ", found, "; allowed: ", listed(allowed));
}
template <class T>
void one_of(const char* argument, const T& value, std::initializer_list<T> allowed) {
  check(std::find(allowed.begin(), allowed.end(), value) != allowed.end(), kOpParam, argument, " is ", value, "; allowed: ", listed(allowed));
}
inline void same_dtype(const char* argument, const at::Tensor& tensor, const char* other, const at::Tensor& like) {
  check(tensor.scalar_type() == like.scalar_type(), kOpParam, argument, " is ", tensor.scalar_type(), " and ", other, " is ", like.scalar_type(),
        "; they must be the same");
}
// The number of dimensions lies in [least, most].
inline void rank(const char* argument, const at::Tensor& tensor, int64_t least, int64_t most) {
  check(tensor.dim() >= least && tensor.dim() <= most, kOpParam, argument, " has ", tensor.dim(), " dimensions; allowed: ", least,
        least == most ? "" : text(" to ", most));
}
inline void rank(const char* argument, const at::Tensor& tensor, int64_t exactly) { rank(argument, tensor, exactly, exactly); }
inline void shape(const char* argument, const at::Tensor& tensor, at::IntArrayRef expected) {
  check(tensor.sizes() == expected, kOpParam, argument, " has shape ", tensor.sizes(), "; it must be ", expected);
}
template <class T, class U>
void within(const char* argument, const T& value, const U& least, const U& most) {
  check(value >= least && value <= most, kOpParam, argument, " is ", value, "; allowed: ", least, " to ", most);
}
inline void multiple(const char* argument, int64_t value, int64_t unit) {
  check(value % unit == 0, kOpParam, argument, " is ", value, "; it must be a multiple of ", unit);
}
inline void contiguous(const char* argument, const at::Tensor& tensor) {
  check(tensor.is_contiguous(), kOpParam, argument, " has strides ", tensor.strides(), " for shape ", tensor.sizes(), "; it must be contiguous");
}
// Only these chip families (is_chip) compute it.
inline void chips(std::initializer_list<const char*> families) {
  check(std::any_of(families.begin(), families.end(), is_chip), kOpParam, "the chip is ", chip().name, "; this operator is there on ", listed(families));
}

}  // namespace emu

#endif  // ASCEND_EMULATOR_CORE_CHECKS_H
