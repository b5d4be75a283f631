// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// A kernel as ascend_emulator/triton compiles them: doubles `slots[2]` floats of the tensor in slot
// 0, one program each, in local memory.
#include <stdint.h>

extern "C" {
void ascend_emulator_triton_check(const void* at, int64_t bytes, int32_t line, int32_t writes);
void* ascend_emulator_triton_allocate(int64_t bytes);
void ascend_emulator_triton_release(void* first);
struct View {
  const void *base, *first;
  int64_t offset, sizes[2], strides[2];
};
struct Ranked {
  int64_t rank;
  const View* view;
};
void ascend_emulator_triton_copy(int64_t size, const Ranked* from, const Ranked* to, int32_t line);
void* ascend_emulator_triton_pointer(int64_t address);

__attribute__((visibility("default"))) void twice(uint64_t* slots) {
  auto* const all = reinterpret_cast<float*>(slots[0]);
  auto* const one = static_cast<float*>(ascend_emulator_triton_allocate(sizeof(float)));
  const auto program = static_cast<int64_t>(slots[6]);
  ascend_emulator_triton_check(all + program, sizeof(float), 7, 0);
  ascend_emulator_triton_check(one, sizeof(float), 8, 1);
  *one = all[program] * 2;
  ascend_emulator_triton_check(all + program, sizeof(float), 9, 1);
  all[program] = *one;
  ascend_emulator_triton_release(one);
}

// Copies the transpose of three rows of two into the place where the address in slot 2 points.
__attribute__((visibility("default"))) void transpose(uint64_t* slots) {
  const auto* const from = reinterpret_cast<const float*>(slots[0]);
  auto* const to = ascend_emulator_triton_pointer(static_cast<int64_t>(slots[2]));
  const View rows{from, from, 0, {2, 3}, {1, 2}}, columns{to, to, 0, {2, 3}, {3, 1}};
  const Ranked source{2, &rows}, target{2, &columns};
  ascend_emulator_triton_copy(sizeof(float), &source, &target, 11);
}
}
