// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Causal convolution with a cache of states, on Ascend950. Semantics and limits: op-plugin's page
// of npu_fused_causal_conv1d (docs/zh/custom_APIs/torch_npu, BSD), whose formulas have the names
// below.
#include "operator/op.h"

using namespace emu;

namespace {

struct CausalConvolution {
  Tensor x, weight, conv_states;
  Opt<Tensor> query_start_loc, cache_indices, initial_state_mode, bias, num_accepted_tokens,
      num_computed_tokens, first_block, last_block, initial_state_idx;
  int64_t activation, pad_slot_id, run_mode, max_query_len, residual, block_size, conv_mode;
  FIELDS(x, weight, conv_states, query_start_loc, cache_indices, initial_state_mode, bias,
      num_accepted_tokens, num_computed_tokens, first_block, last_block, initial_state_idx,
      activation, pad_slot_id, run_mode, max_query_len, residual, block_size, conv_mode)

  bool prefix_caching() const { return cache_indices && cache_indices->dim() == 2; }
  int64_t width() const { return weight.size(0); }

  void check_arguments() const {
    rule("causal_conv1d.starts", x.dim() == 3 || query_start_loc,
        "query_start_loc is None; with an x of two dimensions it is needed");
    rule("causal_conv1d.prefix-caching",
        !prefix_caching() || (num_computed_tokens && first_block && last_block &&
                                 initial_state_idx && block_size > 0),
        "cache_indices has 2 dimensions; num_computed_tokens, block_idx_first_scheduled_token, "
        "block_idx_last_scheduled_token, initial_state_idx and block_size are needed");
    rule("causal_conv1d.pangu", conv_mode == 0 || num_computed_tokens,
        "num_computed_tokens is None; with conv_mode pangu it is needed");
    rule("causal_conv1d.states", conv_states.size(1) >= width() - 1, "conv_states has shape ",
        conv_states.sizes(), "; a state needs ", width() - 1, " rows");
  }

  void run(const Tensor& y) const {
    const int64_t dim = x.size(-1);
    const auto flat = x.reshape({-1, dim}), out = y.view({-1, dim});
    const int64_t batches = query_start_loc ? query_start_loc->numel() - 1 : x.size(0);
    for (int64_t batch = 0; batch < batches; ++batch) {
      const int64_t first = query_start_loc ? at(query_start_loc, batch) : batch * x.size(1),
                    last = query_start_loc ? at(query_start_loc, batch + 1) : first + x.size(1);
      require(0 <= first && first <= last && last <= flat.size(0), "query_start_loc has rows ",
          first, " to ", last, "; x has ", flat.size(0));
      if (first < last) sequence(batch, flat.narrow(0, first, last - first), out, first);
    }
  }

 private:
  static int64_t at(const Opt<Tensor>& numbers, int64_t index) {
    return (*numbers)[index].item<int64_t>();
  }
  int64_t line(int64_t batch, const Opt<Tensor>& block) const {
    if (!cache_indices) return batch;
    return prefix_caching() ? (*cache_indices)[batch][at(block, batch)].item<int64_t>()
                            : at(cache_indices, batch);
  }
  Tensor state(int64_t index) const {
    require(index >= 0 && index < conv_states.size(0), "cache_indices has ", index,
        "; conv_states has ", conv_states.size(0), " states");
    return conv_states[index];
  }

  void sequence(int64_t batch, const Tensor& rows, const Tensor& out, int64_t first) const {
    const int64_t read = line(batch, initial_state_idx), before = width() - 1,
                  length = rows.size(0), depth = conv_states.size(1);
    if (read == pad_slot_id) return;
    const bool begins = num_computed_tokens && at(num_computed_tokens, batch) == 0;
    int64_t offset = 0;
    if (!begins && num_accepted_tokens) {
      offset = at(num_accepted_tokens, batch) - 1;
      require(offset >= 0 && offset < length && offset + before <= depth,
          "num_accepted_tokens has ", offset + 1, " for ", length, " tokens and ", depth,
          " rows of a state");
    } else if (!begins) {
      offset = depth - before;
    }
    const auto cached = begins ? at::zeros({before, rows.size(1)}, rows.options())
                               : state(read).narrow(0, 0, offset + before);
    const auto all = at::concat({cached, rows});
    const int64_t kept = std::min(depth, all.size(0));
    state(line(batch, last_block))
        .narrow(0, depth - kept, kept)
        .copy_(all.narrow(0, all.size(0) - kept, kept));
    const auto padded = all.narrow(0, offset, before + length);
    if (prefix_caching()) fill_blocks(batch, padded, length);

    const auto fp32 = padded.to(at::kFloat), taps = weight.to(at::kFloat);
    auto sum = fp32.narrow(0, 0, length) * taps[0];
    for (int64_t tap = 1; tap < width(); ++tap) sum = sum + fp32.narrow(0, tap, length) * taps[tap];
    if (conv_mode == 1) {
      const int64_t reset = before - at(num_computed_tokens, batch);
      sum.narrow(0, 0, std::clamp(reset, int64_t{0}, length)).zero_();
    }
    out.narrow(0, first, length).copy_(residual ? sum + rows.to(at::kFloat) : sum);
  }

  // The states at the ends of the blocks that the tokens fill.
  void fill_blocks(int64_t batch, const Tensor& padded, int64_t length) const {
    const int64_t to_end = block_size - at(num_computed_tokens, batch) % block_size,
                  rest = ((length - to_end) % block_size + block_size) % block_size,
                  last_full = length - rest - (rest == 0 ? block_size : 0),
                  from = at(first_block, batch), count = at(last_block, batch) - from,
                  before = width() - 1;
    for (int64_t block = 0; block < count; ++block) {
      const int64_t end = last_full - (count - block - 1) * block_size;
      require(end > 0 && end <= length, "block ", block, " of sequence ", batch, " ends at token ",
          end, " of ", length);
      state((*cache_indices)[batch][from + block].item<int64_t>())
          .narrow(0, conv_states.size(1) - before, before)
          .copy_(padded.narrow(0, end, before));
    }
  }
};

}  // namespace

CHECKED(aclnnFusedCausalConv1d, (CausalConvolution call, Tensor y), {
  call.check_arguments();
  COMPUTE { call.run(y); };
})
// The result replaces x.
CHECKED(aclnnInplaceFusedCausalConv1d, (CausalConvolution call), {
  call.check_arguments();
  COMPUTE {
    const auto y = call.x.clone();
    call.run(y);
    call.x.copy_(y);
  };
})
