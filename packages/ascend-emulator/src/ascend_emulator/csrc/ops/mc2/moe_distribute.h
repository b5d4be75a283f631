// Tokens to the experts of other ranks and back. Semantics and limits: torch_npu's documentation of
// npu_moe_distribute_dispatch[_v2] and npu_moe_distribute_combine[_v2] (op-plugin's docs/zh/custom_APIs/torch_npu, BSD),
// op-plugin's test_moe_distribute_*.py.
#ifndef ASCEND_EMULATOR_OPS_MC2_MOE_DISTRIBUTE_H
#define ASCEND_EMULATOR_OPS_MC2_MOE_DISTRIBUTE_H
#include "mc2.h"

namespace emu::mc2 {

// The first interface has narrower limits, and none of the second one's special experts, masks and algorithms.
enum class Version { one, two };

inline bool absent(const Opt<Tensor>& tensor) { return !tensor || !tensor->defined() || tensor->numel() == 0; }
void reserved(const char* argument, const Opt<Tensor>& tensor);  // refuses if it is given

// One copy of a token on its way to an expert.
struct Slot {
  int64_t token;
  int64_t choice;  // which of its top-k, or k + the shared expert's number
};
using Slots = std::vector<Slot>;

// Where the experts are: the ranks of shared experts come first, each shared expert on as many of them as the others; then those
// of MoE experts.
struct Experts {
  Version version;
  std::shared_ptr<hccl::Communicator> on;
  int64_t experts, shared, shared_ranks, global_tokens;
  int64_t zero = 0, copy = 0, constant = 0;  // special experts, with the ids behind the MoE experts'
  std::string algorithm;

  Experts(Version version, const std::string& group, int64_t ranks, int64_t rank, int64_t experts, int64_t tp_ranks,
      int64_t shard_type, int64_t shared, int64_t shared_ranks, int64_t global_tokens, const std::string& algorithm, int64_t zero,
      int64_t copy, int64_t constant);

  void check_tokens(const Tensor& ids, const Opt<Tensor>& mask, int64_t hidden, bool words) const;
  int64_t ranks() const { return on->ranks; }
  int64_t local(int64_t rank) const { return rank < shared_ranks ? 1 : experts / (ranks() - shared_ranks); }
  int64_t all_experts() const { return experts + zero + copy + constant; }
  int64_t most_rows(int64_t choices) const;  // that this rank can receive
  void agree(const hccl::Header& call, int64_t choices, std::initializer_list<hccl::Told> more) const;

  // What this rank sends: by receiver, by the receiver's expert, in the order of the tokens. Throws on ids that are none.
  std::vector<std::vector<Slots>> route(const Tensor& ids, const Opt<Tensor>& mask) const;
};

// Whether each choice of each token takes part: [tokens, k], from a mask of tokens, of choices, or none.
Tensor taking_part(const Tensor& ids, const Opt<Tensor>& mask);

// The results of the experts as this rank's tokens.
struct Combination {
  Experts at;
  Tensor expand_x, ids, info, counts, scales;
  Opt<Tensor> mask, shared_x, original, alpha1, alpha2, added;

  void check_arguments() const;
  void run(const std::function<void(const Tensor&)>& use) const;  // on [tokens, hidden] in float

 private:
  void add_special(const Tensor& sum, int64_t k) const;  // of the kth choices
};

Tensor from_ints(const std::vector<int64_t>& values);

}  // namespace emu::mc2

#endif  // ASCEND_EMULATOR_OPS_MC2_MOE_DISTRIBUTE_H
