// What operators that compute and communicate share (MC2: csrc/ops/mc2_*.cpp). Such an operator is one call on a communicator, as
// a collective is: it fails as one does, the other ranks learn of it, and ranks that call something else meanwhile are told.
#ifndef ASCEND_EMULATOR_OPS_MC2_MC2_H
#define ASCEND_EMULATOR_OPS_MC2_MC2_H
#include <initializer_list>

#include "operator/communicates.h"
#include "operator/op.h"
#include "hccl/collectives.h"

namespace emu::hccl {

// The communicator of this name (hccl/api.h), for an operator that is called now: it has not failed yet and has as many ranks as
// the operator was told.
std::shared_ptr<Communicator> group(const char* argument, const std::string& name);
void check_ranks(const char* argument, int64_t told, const Communicator& on);

// The header of a call with `count` elements that are the same on all ranks.
Header fused_header(CallKind kind, at::ScalarType type, int64_t count);

// Runs the body as one call. What it throws fails the communicator.
void fused(Communicator& on, const Header& call, const std::function<void()>& body);

// Within it: throws on the first of these values that another rank has otherwise.
struct Told {
  const char* name;
  int64_t value;
};
void agree(Communicator& on, const Header& call, const std::vector<Told>& values);

// Within it: to each rank its tensor, which is contiguous, from each rank into its tensor. This rank's own goes over too.
void exchange(Communicator& on, const Header& call, const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in);
// All ranks' tensors, of this one's shape, one after the other in a new first dimension.
at::Tensor gathered(Communicator& on, const Header& call, const at::Tensor& own);

}  // namespace emu::hccl

// As CHECKED, for an operator that communicates.
#define FUSED(NAME, PARAMS, ...)                                                            \
  CHECKED(NAME, PARAMS, __VA_ARGS__)                                                        \
  namespace emu::ops {                                                                      \
  [[maybe_unused]] static const bool communicating_##NAME = emu::communicates(#NAME, true); \
  }

#endif  // ASCEND_EMULATOR_OPS_MC2_MC2_H
