// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// In front of ATen's own header, which each header of ATen's functions includes and none uses: its
// clock needs all of the compiler's intrinsics.
#pragma once
