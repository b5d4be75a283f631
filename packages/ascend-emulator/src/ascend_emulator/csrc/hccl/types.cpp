// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "types.h"

#include <algorithm>
#include <map>

#include "core/device.h"

namespace emu::hccl {
namespace {

const std::map<int, DataType> kTypes = {{0, {"int8", 1, at::kChar}}, {1, {"int16", 2, at::kShort}},
    {2, {"int32", 4, at::kInt}}, {3, {"float16", 2, at::kHalf}}, {4, {"float32", 4, at::kFloat}},
    {5, {"int64", 8, at::kLong}}, {6, {"uint64", 8, {}}}, {7, {"uint8", 1, at::kByte}},
    {8, {"uint16", 2, {}}}, {9, {"uint32", 4, {}}}, {10, {"float64", 8, at::kDouble}},
    {11, {"bfloat16", 2, at::kBFloat16}}, {14, {"hifloat8", 1, {}}}, {15, {"float8_e4m3", 1, {}}},
    {16, {"float8_e5m2", 1, {}}}, {17, {"float8_e8m0", 1, {}}}};

void one_of_types(const char* what, int code, const std::vector<int>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), code) != allowed.end()) return;
  std::vector<const char*> names;
  for (const int each : allowed) names.push_back(data_type(each).name);
  refuse_call(kNotSupported, what, " is ", data_type(code).name, "; allowed on ", chip().name, ": ",
      listed(names));
}

}  // namespace

const char* describe(int result) {
  static const std::map<int, const char*> texts = {{0, "no error"}, {1, "a parameter is wrong"},
      {2, "a pointer is null"}, {3, "memory"}, {4, "internal error"}, {5, "not supported"},
      {6, "not found"}, {7, "unavailable"}, {8, "system call"}, {9, "timeout"},
      {10, "a file does not open"}, {11, "TCP connection"}, {12, "RoCE connection"},
      {13, "TCP transfer"}, {14, "RoCE transfer"}, {15, "runtime"}, {16, "driver"},
      {17, "profiling"}, {18, "compute engine"}, {19, "network"}, {20, "again"},
      {21, "a remote rank failed"}, {22, "communicator suspended"}};
  const auto found = texts.find(result);
  return found == texts.end() ? "unknown error" : found->second;
}

const char* reduction_name(int op) {
  static const char* names[] = {"sum", "prod", "max", "min"};
  return op >= kSum && op <= kMin ? names[op] : "none";
}

const DataType& data_type(int code) {
  const auto found = kTypes.find(code);
  if (found == kTypes.end()) refuse_call(kParameter, "unknown data type ", code);
  return found->second;
}

const char* data_type_name(int code) {
  const auto found = kTypes.find(code);
  return found == kTypes.end() ? "unknown type" : found->second.name;
}

void check_transferable(int code) {
  std::vector<int> allowed{0, 7, 1, 8, 2, 9, 5, 6, 3, 4, 10};
  if (chip().bfloat16) allowed.push_back(11);
  if (is_chip("Ascend950")) allowed.insert(allowed.end(), {14, 15, 16, 17});
  one_of_types("the data type", code, allowed);
}

// "HcclAllReduce", "HcclReduce", "HcclReduceScatter": same lists. uint64 of Ascend950 is not
// supported: ATen cannot add it.
void check_reducible(int code, int op) {
  if (op < kSum || op > kMin)
    refuse_call(
        kParameter, "the reduction is ", op, "; allowed: 0 (sum), 1 (prod), 2 (max), 3 (min)");
  const bool duo = is_chip("Ascend310P");
  std::vector<int> allowed{0};
  if (!(op == kProd || (duo && op != kSum))) allowed.push_back(1);
  allowed.push_back(2);
  if (!duo) allowed.push_back(5);
  allowed.insert(allowed.end(), {3, 4});
  if (is_chip("Ascend950")) allowed.push_back(10);
  if (!duo && op != kProd) allowed.push_back(11);
  one_of_types(text("the data type of a reduction by ", reduction_name(op)).c_str(), code, allowed);
}

}  // namespace emu::hccl
