// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// In front of ATen's own header, which each header of ATen's functions includes and none uses: its
// device_of(ITensorListRef) needs c10::List and c10::IValue. at::concat takes an array of tensors
// where at::cat takes such a list.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
