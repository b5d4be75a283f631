// Profiling and logging hooks that torch_npu links against. Nothing is recorded yet, so switching a profiler on refuses by name
// (generated); these are the calls it makes whether or not one is on.
#include "../core/registry.h"

#define QUIET(TYPE, NAME, PARAMS) ACL_VALUE(TYPE, nothing("no profile is being recorded"), NAME, PARAMS, { return TYPE(); })

QUIET(int, MsprofRegisterCallback, (...))
QUIET(int, MsprofReportAdditionalInfo, (...))
QUIET(int, MsprofReportApi, (...))
QUIET(int, MsprofReportCompactInfo, (...))
QUIET(uint64_t, MsprofGetHashId, (...))
QUIET(uint64_t, MsprofSysCycleTime, ())
ACL_VALUE(void, nothing("torch_npu's log goes to its own output as well"), aclAppLog, (...), {})
