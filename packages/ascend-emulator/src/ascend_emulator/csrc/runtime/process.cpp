// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The order in which the parts of the process end.
#include "core/process.h"

#include "core/stream.h"
#include "core/trace.h"
#include "memory_types.h"

namespace emu {

void end_captures(int npu);  // graph.cpp: they end without graphs

void Process::reset(int npu) {
  end_captures(npu);
  end_streams(npu);
  free_physical_of(npu);
  device(npu).reset();
  device(npu).active = false;
}

void Process::exit() {
  if (forked()) return;
  stop_streams();
  flush_trace();
}

}  // namespace emu
