// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#ifndef ASCEND_EMULATOR_RUNTIME_GRAPH_H
#define ASCEND_EMULATOR_RUNTIME_GRAPH_H

namespace emu {

void end_captures(int device);  // the device is reset: its captures end, without graphs

}  // namespace emu

#endif  // ASCEND_EMULATOR_RUNTIME_GRAPH_H
