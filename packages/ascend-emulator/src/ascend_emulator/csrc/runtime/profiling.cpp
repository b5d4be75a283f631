// Profiling and logging hooks that torch_npu links against. Nothing is recorded yet, so switching a profiler on refuses by name
// (generated); these are the calls it makes whether or not one is on.
#include "../core/registry.h"

#define QUIET(TYPE, NAME, PARAMS)                                                             \
  static const emu::Registration registration_##NAME{#NAME, emu::State::bookkeeping, __FILE__}; \
  EXPORT TYPE NAME PARAMS { return TYPE(); }

QUIET(int, MsprofRegisterCallback, (...))
QUIET(int, MsprofReportAdditionalInfo, (...))
QUIET(int, MsprofReportApi, (...))
QUIET(int, MsprofReportCompactInfo, (...))
QUIET(uint64_t, MsprofGetHashId, (...))
QUIET(uint64_t, MsprofSysCycleTime, ())
QUIET(void, aclAppLog, (...))
