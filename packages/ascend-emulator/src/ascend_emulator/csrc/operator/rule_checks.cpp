// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include <cstring>

#include "op.h"

namespace emu {

// A clause and the positions of its parameters in the operator's parameter list.
struct BoundClause {
  const Clause* clause;
  int argument, other;  // -1: this operator does not have it
};

}  // namespace emu

namespace emu::rule_checks {
namespace {

int position(const OperatorInfo& info, size_t parameters, const char* name) {
  for (size_t i = 0; name && i < parameters; ++i)
    if (nth(info.parameters, static_cast<int64_t>(i)) == name) return static_cast<int>(i);
  return -1;
}

const std::vector<BoundClause>& rules_of(OperatorInfo& info, size_t parameters) {
  if (const auto* known = info.rules.load(std::memory_order_acquire)) return *known;
  auto bound = std::make_unique<std::vector<BoundClause>>();
  for (const auto* each = operator_rules; each->name; ++each)
    if (!std::strcmp(each->name, info.name))
      for (const auto* clause = each->first; clause != each->last; ++clause)
        bound->push_back({clause, position(info, parameters, clause->argument),
            position(info, parameters, clause->other)});
  return *(info.rules = bound.release());  // for as long as the operator exists
}

int64_t family() {
  static const int64_t found = [] {
    int64_t index = 0;
    while (chip_families[index] && !is_chip(chip_families[index])) ++index;
    return index;
  }();
  return found;
}

int64_t number(Subject subject, const Tensor& tensor, int64_t dim) {
  switch (subject) {
    case Subject::dtype: return static_cast<int64_t>(tensor.scalar_type());
    case Subject::contiguous: return tensor.is_contiguous();
    case Subject::rank: return tensor.dim();
    case Subject::elements: return tensor.numel();
    default: break;
  }
  // A rank is checked by a rule of its own.
  return tensor.dim() > (dim < 0 ? -1 - dim : dim) ? tensor.size(dim) : 0;
}

bool holds(const Clause& clause, int64_t found, int64_t other) {
  const auto* const last = clause.values + clause.count;
  if (clause.subject == Subject::text)
    return std::any_of(clause.values, last, [&](int64_t each) {
      return found && !std::strcmp(rule_texts[each], reinterpret_cast<const char*>(found));
    });
  switch (clause.predicate) {
    case Predicate::one_of: return std::find(clause.values, last, found) != last;
    case Predicate::range: return found >= clause.values[0] && found <= clause.values[1];
    case Predicate::multiple: return found % clause.values[0] == 0;
    default: return found == other;
  }
}

std::string named(Subject subject, const char* label, int64_t dim) {
  if (subject == Subject::rank) return text("the number of dimensions of ", label);
  if (subject == Subject::elements) return text("the number of elements of ", label);
  if (subject != Subject::size) return label;
  return dim == -1 ? text("the last dimension of ", label) : text("dimension ", dim, " of ", label);
}

// Throws the error of a clause that does not hold.
[[noreturn]] void refuse(
    const Clause& clause, int64_t found, int64_t other, const Tensor& tensor, const Tensor& like) {
  const auto what = named(clause.subject, clause.label, clause.dim);
  const std::vector<int64_t> values(clause.values, clause.values + clause.count);
  const bool same = clause.predicate == Predicate::same;
  std::vector<const char*> names;
  std::vector<at::ScalarType> dtypes;
  for (const auto value : values) {
    if (clause.subject == Subject::chip) names.push_back(chip_families[value]);
    if (clause.subject == Subject::text) names.push_back(rule_texts[value]);
    dtypes.push_back(static_cast<at::ScalarType>(value));
  }
  switch (clause.subject) {
    case Subject::chip:
      raise(kOpParam,
          {"the chip is ", chip().name, "; this operator is supported on ", listed(names)});
    case Subject::text:
      not_one_of(clause.label, reinterpret_cast<const char*>(found), listed(names));
    case Subject::given:
      raise(kOpParam, {what, found ? " is given; only None is allowed" : " is needed"});
    case Subject::dtype:
      if (!same) not_one_of(clause.label, tensor.scalar_type(), listed(dtypes));
      same_dtype(clause.label, tensor, clause.other_label, like);
      break;
    case Subject::contiguous: contiguous(clause.label, tensor); break;
    case Subject::shape: shape(clause.label, tensor, like.sizes()); break;
    case Subject::rank:
      if (!same) rank(clause.label, tensor, values.front(), values.back());
      break;
    default: break;
  }
  if (same)
    raise(kOpParam, {what, " is ", found, " and ",
                        named(clause.other_subject, clause.other_label, clause.other_dim), " is ",
                        other, "; they must be the same"});
  if (clause.predicate == Predicate::multiple) multiple(what.c_str(), found, values[0]);
  if (clause.predicate == Predicate::range) within(what.c_str(), found, values[0], values[1]);
  not_one_of(what.c_str(), found, listed(values));
}

}  // namespace
}  // namespace emu::rule_checks

namespace emu {

bool ArgumentReader::holds(const BoundClause& bound) const {
  const auto& clause = *bound.clause;
  static const Tensor none;
  const auto tensors_of = [&](int position) {
    return position < 0
               ? std::pair<size_t, size_t>(0, 0)
               : std::pair<size_t, size_t>(position ? ends_[position - 1] : 0, ends_[position]);
  };
  const auto value_of = [&](Subject subject, int position, int64_t dim, const Tensor& tensor) {
    if (subject == Subject::chip) return rule_checks::family();
    if (subject == Subject::given) return static_cast<int64_t>(tensor.defined());
    if (subject < Subject::value) return rule_checks::number(subject, tensor, dim);
    for (const auto& [at, value] : integers_)
      if (at == position) return value;
    return int64_t{0};
  };
  // A weight in FRACTAL_NZ is in the list as it is stored; rules are about its matrix.
  const auto matrix = [&](const Tensor& tensor) -> const Tensor& {
    for (const auto& [storage, plain] : executor_.fractals)
      if (storage.is_same(tensor)) return plain;
    return tensor;
  };
  // Rules of a family are about parameters that not all of its operators have, and that not all
  // calls give.
  const Tensor* like = &none;
  if (clause.predicate == Predicate::same) {
    const auto [start, end] = tensors_of(bound.other);
    if (start != end) like = &matrix(tensors_[start]);
    if (clause.other_subject == Subject::value ? bound.other < 0 : !like->defined())
      return !clause.condition;
  }
  const auto test = [&](const Tensor& tensor) {
    const bool shapes = clause.subject == Subject::shape;
    const int64_t found = shapes ? tensor.sizes() == like->sizes()
                                 : value_of(clause.subject, bound.argument, clause.dim, tensor),
                  other = shapes ? 1
                          : clause.predicate == Predicate::same
                              ? value_of(clause.other_subject, bound.other, clause.other_dim, *like)
                              : 0;
    if (rule_checks::holds(clause, found, other)) return true;
    if (!clause.condition)
      rule(
          rules[clause.rule].id, [&] { rule_checks::refuse(clause, found, other, tensor, *like); });
    return false;
  };
  const auto [first, last] = tensors_of(bound.argument);
  if (clause.subject == Subject::given) return test(first == last ? none : tensors_[first]);
  if (clause.subject == Subject::chip) return test(none);
  if (clause.subject >= Subject::value) return bound.argument < 0 ? !clause.condition : test(none);
  bool held = !clause.condition;
  for (size_t i = first; i < last; ++i) {
    if (!tensors_[i].defined()) continue;
    held = test(matrix(tensors_[i]));
    if (clause.condition) return held;
  }
  return held;
}

void ArgumentReader::check_rules() const {
  bool applies = true;
  for (const auto& bound : rule_checks::rules_of(info_, ends_.size())) {
    if (applies) applies = holds(bound) || !bound.clause->condition;
    if (!bound.clause->condition) applies = true;
  }
}

}  // namespace emu
