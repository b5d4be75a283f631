// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// The gated delta rule of linear attention, token by token in float32. Rules: op-plugin's pages of
// npu_recurrent_gated_delta_rule and npu_chunk_gated_delta_rule for CANN 9.1 (branch 26.1.0,
// 09024aa9); for the ranges of values its later one (517f2e7d), which also has keys below 128 and,
// on Ascend950, float32 states; argument order: op-plugin's call sites. torch_npu 2.13's own pages
// are older: no decays of keys, and at most 8 tokens in the chunk rule, against its example of 100.
#include "operator/op.h"

namespace {

using namespace emu;

struct DeltaRule {
  Tensor query, key, value, beta;
  Opt<Tensor> decay;
  float scale;
  Tensor out;
  Opt<Tensor> decay_of_keys = {};

  void check_heads() const {
    emu::rule("gated_delta_rule.heads", value.size(1) % query.size(1) == 0, "query has ",
        query.size(1), " heads and value ", value.size(1),
        "; the second must be a multiple of the first");
  }

  // Changes the float32 state [heads, values, keys] by a token.
  void step(Tensor& state, int64_t token) const {
    const int64_t groups = value.size(1) / key.size(1);
    const auto heads = [&](const Tensor& x) {
      return x[token].to(at::kFloat).repeat_interleave(groups, 0);
    };
    const auto k = heads(key).unsqueeze(1), q = heads(query).unsqueeze(1) * scale;
    if (decay) state = state * (*decay)[token].exp().view({-1, 1, 1});
    if (decay_of_keys) state = state * (*decay_of_keys)[token].exp().unsqueeze(1);
    const auto change = (value[token].to(at::kFloat) - (state * k).sum(-1)) *
                        beta[token].to(at::kFloat).unsqueeze(-1);
    state = state + change.unsqueeze(-1) * k;
    out[token].copy_((state * q).sum(-1));
  }
};

std::vector<int64_t> numbers(const Tensor& x) {
  const auto values = x.to(at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

void check_range(const char* argument, const Tensor& x, float least, float most) {
  const auto [low, high] = x.aminmax();
  for (const auto& found : {low.item<float>(), high.item<float>()})
    require(found >= least && found <= most, argument, " has ", found, "; allowed: ", least, " to ",
        most);
}

std::vector<int64_t> lengths_of(const Tensor& x, int64_t most, int64_t tokens) {
  const auto lengths = numbers(x);
  int64_t total = 0;
  for (const auto length : lengths) {
    within("actual_seq_lengths", length, int64_t{1}, most);
    total += length;
  }
  require(total == tokens, "actual_seq_lengths add up to ", total, " and there are ", tokens,
      " tokens");
  return lengths;
}

}  // namespace

CHECKED(aclnnRecurrentGatedDeltaRule,
    (Tensor query, Tensor key, Tensor value, Tensor beta, Tensor state, Opt<Tensor> lengths,
        Opt<Tensor> indices, Opt<Tensor> decay, Opt<Tensor> decay_of_keys, Opt<Tensor> accepted,
        float scale, Tensor out),
    {
      const DeltaRule delta{query, key, value, beta, decay, scale, out, decay_of_keys};
      delta.check_heads();
      require(state.size(0) >= query.size(0), "state has ", state.size(0), " blocks; at least the ",
          query.size(0), " of the tokens are needed");
      COMPUTE {
        const auto counts = lengths_of(*lengths, 8, delta.query.size(0)),
                   blocks = numbers(*indices);
        const auto taken = accepted ? numbers(*accepted) : std::vector<int64_t>(counts.size(), 1);
        // a state is read for each request, and one written for each token
        cost::partial_access(
            state, static_cast<double>((counts.size() + blocks.size()) * state[0].nbytes()));
        for (const auto block : blocks)
          require(block >= 0 && block < state.size(0), "ssm_state_indices has ", block,
              "; state has ", state.size(0), " blocks");
        int64_t token = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          require(taken[i] >= 1 && taken[i] <= counts[i], "num_accepted_tokens has ", taken[i],
              "; allowed: 1 to ", counts[i]);
          auto changed = state[blocks[token + taken[i] - 1]].to(at::kFloat);
          for (const int64_t end = token + counts[i]; token < end; ++token) {
            delta.step(changed, token);
            state[blocks[token]].copy_(changed);
          }
        }
      };
    })

CHECKED(aclnnChunkGatedDeltaRule,
    (Tensor query, Tensor key, Tensor value, Tensor beta, Opt<Tensor> initial, Opt<Tensor> lengths,
        float scale, Opt<Tensor> decay, Tensor out, Tensor final),
    {
      const DeltaRule delta{query, key, value, beta, decay, scale, out};
      delta.check_heads();
      COMPUTE {
        const auto counts = lengths_of(*lengths, delta.query.size(0), delta.query.size(0));
        // The page has -1 to 0, beyond which results "may overflow". vllm-ascend passes the decays
        // of trained weights, which are far below (ops/gdn.py, pull request 12647: Qwen3.5).
        if (delta.decay) check_range("g", *delta.decay, -std::numeric_limits<float>::infinity(), 0);
        for (const auto& [name, x] :
            {std::pair{"query", &delta.query}, std::pair{"key", &delta.key}})
          check_range(name, *x, -1, 1);
        check_range("beta", delta.beta, 0, 1);
        int64_t token = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          auto changed = (*initial)[i].to(at::kFloat);
          for (const int64_t end = token + counts[i]; token < end; ++token)
            delta.step(changed, token);
          final[i].copy_(changed);
        }
      };
    })
