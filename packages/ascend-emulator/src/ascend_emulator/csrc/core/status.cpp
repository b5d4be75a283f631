#include "status.h"

namespace emu {
namespace {
thread_local std::string last_message;
thread_local std::string returned_message;
}  // namespace

int fail(Status status, const std::string& message) {
  last_message = "[ascend-emulator] " + message;
  return status;
}

int refuse(const char* name) {
  return fail(kUnsupported, text(name, " is not emulated. `ascend-emulator coverage` lists what is."));
}

}  // namespace emu

// Returns the calling thread's last message and clears it, as torch_npu expects (c10_npu_get_error_message).
EXPORT const char* aclGetRecentErrMsg() {
  using namespace emu;
  returned_message.swap(last_message);
  last_message.clear();
  return returned_message.empty() ? nullptr : returned_message.c_str();
}
