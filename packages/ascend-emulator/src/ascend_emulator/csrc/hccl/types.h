// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// HCCL's constants and limits. Source of the values and of the limits: Huawei's public API
// reference "HCCL" (HcclDataType, HcclReduceOp, HcclResult, HcclCommConfig, and each operation's
// page); of the signatures, torch_npu/csrc/distributed/HcclCompile.h (Ascend/pytorch, BSD).
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "core/status.h"

namespace emu::hccl {

enum Code : int {
  kSuccess = 0,
  kParameter = 1,
  kNullPointer = 2,
  kMemory = 3,
  kInternal = 4,
  kNotSupported = 5,
  kNotFound = 6,
  kUnavailable = 7,
  kTimeout = 9,
  kOpenFile = 10,
  kConnect = 11,
  kRemote = 21,
  kSuspending = 22,
};
const char* describe(int result);

// Error of a call. An operation that fails on its stream also fails the stream with an ACL code
// (communicator.h).
template <class... Parts> [[noreturn]] void refuse_call(Code result, const Parts&... parts) {
  // Only these two are about the call: the others are states of ranks and connections.
  const bool classed = result != kParameter && result != kNotSupported;
  throw Error(static_cast<Status>(result), text(parts...), classed);
}

enum Reduction : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };
const char* reduction_name(int op);

struct DataType {
  const char* name;
  uint64_t bytes;
  std::optional<at::ScalarType> scalar;  // dtype of its reductions
};
const DataType& data_type(int code);   // throws if the code is none
const char* data_type_name(int code);  // for messages, of any code

// Throw unless the chip can transfer, or reduce, this type; the message lists the allowed types.
void check_transferable(int code);
void check_reducible(int code, int op);

// First members of HcclCommConfig; later ones are not used. `size` is set by HcclCommConfigInit.
struct Config {
  uint64_t size;
  char reserved[16];
  uint32_t buffer_size;
  uint32_t deterministic;
  char name[128];
  char user_information[128];
  uint32_t expansion_mode;
  uint32_t traffic_class;
  uint32_t service_level;
  uint32_t world_rank;
  uint64_t job;
  uint8_t graph_zero_copy;
  int32_t exec_timeout;  // seconds; -1 is unset
  char algorithm[1600];
  char retry[50];
  char retry_parameters[128];
  char buffer_name[128];
};

struct SendReceive {  // HcclSendRecvItem
  int32_t kind;       // 0 send, 1 receive
  void* buffer;
  uint64_t count;
  int32_t type;
  uint32_t peer;
};

}  // namespace emu::hccl
