// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Merging partial attention results, and batched matmuls around them. Rules: torch_npu's
// documentation of npu_attention_update, npu_ring_attention_update and npu_transpose_batchmatmul
// (torch_npu/_op_plugin_docs.py); argument order: op-plugin's call sites.
#include "ops/cube_math.h"

using namespace emu;

// A partial result without keys has a log-sum-exp of +inf, as in the fused attention.
CHECKED(aclnnAttentionUpdate,
    (Tensors lse, Tensors parts, int64_t type, Tensor out, Opt<Tensor> lse_out), {
      require(!lse.empty() && lse.size() == parts.size(), "lists of ", lse.size(), " lse and ",
          parts.size(), " local_out; they must be as long");
      rule("attention_update.parts", lse.size() <= 16, "lists of ", lse.size(),
          " lse and local_out; at most 16 are allowed");
      for (const auto& each : parts) shape("local_out", each, parts[0].sizes());
      COMPUTE {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        auto sums = at::stack(lse);
        sums.masked_fill_(sums == kInfinity, -kInfinity);
        const auto total = at::logsumexp(sums, 0);
        const auto weights = (sums - total).exp_().masked_fill_(sums == -kInfinity, 0);
        auto fp32 = at::zeros(out.sizes(), at::kFloat);
        for (size_t i = 0; i < parts.size(); ++i)
          fp32.add_(parts[i].to(at::kFloat).masked_fill((weights[i] == 0).unsqueeze(-1), 0) *
                    weights[i].unsqueeze(-1));
        out.copy_(fp32);
        if (lse_out && type == 1)
          Tensor(*lse_out).copy_(total.masked_fill(total == -kInfinity, kInfinity));
      };
    })

// SBH: outputs [S, B, N * D], statistics [B, N, S, 8]. TND: [T, N, D], and statistics [T, N, 8], or
// concatenated requests [N, S, 8].
CHECKED(aclnnRingAttentionUpdateV2,
    (Tensor old_out, Tensor old_most, Tensor old_sum, Tensor new_out, Tensor new_most,
        Tensor new_sum, Opt<Tensor> ends, Text layout, Text stats_layout, Tensor out, Tensor most,
        Tensor sum),
    {
      one_of<Text>("input_softmax_layout", stats_layout, {"", "SBH", "TND"});
      require(layout != "TND" || ends, "layout TND needs actual_seq_qlen");
      COMPUTE {
        const auto highest = at::maximum(old_most, new_most);
        const auto old_share = old_sum * (old_most - highest).exp(),
                   new_share = new_sum * (new_most - highest).exp();
        const auto total = old_share + new_share;
        auto by_old = (old_share / total).select(-1, 0), by_new = (new_share / total).select(-1, 0);
        if (layout == "SBH") {
          const Ints heads{old_out.size(0), old_out.size(1), by_old.size(1), -1};
          const auto spread = [](const Tensor& x) { return x.permute({2, 0, 1}).unsqueeze(-1); };
          out.copy_((old_out.to(at::kFloat).view(heads) * spread(by_old) +
                     new_out.to(at::kFloat).view(heads) * spread(by_new))
                  .view(out.sizes()));
        } else {
          if (stats_layout != "TND") {  // requests as [N, S]
            const auto where = ends->contiguous();
            const auto* end = where.const_data_ptr<int64_t>();
            const int64_t heads = by_old.size(1);
            for (auto* x : {&by_old, &by_new}) {
              const auto flat = x->reshape(-1);
              auto sorted = at::empty_like(*x);
              for (int64_t i = 0; i < where.numel(); ++i) {
                const int64_t start = i ? end[i - 1] : 0, count = end[i] - start;
                if (count > 0)
                  sorted.narrow(0, start, count)
                      .copy_(flat.narrow(0, start * heads, count * heads).view({heads, count}).t());
              }
              *x = sorted;
            }
          }
          out.copy_(old_out.to(at::kFloat) * by_old.unsqueeze(-1) +
                    new_out.to(at::kFloat) * by_new.unsqueeze(-1));
        }
        most.copy_(highest);
        sum.copy_(total);
      };
    })
CHECKED(aclnnRingAttentionUpdate,
    (Tensor old_out, Tensor old_most, Tensor old_sum, Tensor new_out, Tensor new_most,
        Tensor new_sum, Opt<Tensor> ends, Text layout, Tensor out, Tensor most, Tensor sum),
    {
      return body_aclnnRingAttentionUpdateV2(
          old_out, old_most, old_sum, new_out, new_most, new_sum, ends, layout, "", out, most, sum);
    })

CHECKED(aclnnTransposeBatchMatMul,
    (Tensor x, Tensor weight, Opt<Tensor> bias, Opt<Tensor> scale, Ints perm_x, Ints perm_weight,
        Ints perm_y, CubeMath cube, int64_t split, Tensor out),
    {
      cube.check(x);
      require_emulated(!scale, "scale is not emulated");
      const auto allowed = [](const char* name, const Ints& found, std::vector<Ints> choices) {
        require(
            std::find(choices.begin(), choices.end(), found) != choices.end(), name, " should be ",
            [&] {
              std::string all;
              for (const auto& choice : choices)
                all += text(all.empty() ? "[" : " or [", listed(choice), "]");
              return all;
            }(),
            ", not [", listed(found), "]");
      };
      allowed("perm_x1", perm_x, {{0, 1, 2}, {1, 0, 2}});
      allowed("perm_x2", perm_weight, {{0, 1, 2}, {0, 2, 1}});
      allowed("perm_y", perm_y, {{1, 0, 2}});
      const auto left = x.permute(perm_x), right = weight.permute(perm_weight);
      require(left.size(0) == right.size(0) && left.size(2) == right.size(1), "input ", x.sizes(),
          " and weight ", weight.sizes(), " do not multiply when permuted by [", listed(perm_x),
          "] and [", listed(perm_weight), "]");
      rule("transpose_batch_matmul.sizes", [&] {
        multiple("K", left.size(2), 16);
        multiple("N", right.size(2), 16);
        within("B", left.size(0), 1, 65535);
        within("N", right.size(2), 1, 65535);
        within(perm_x[0] ? "K x B" : "K", left.size(2) * (perm_x[0] ? left.size(0) : 1), 1, 65535);
      });
      require(split >= 1 && left.size(0) % split == 0, "batch_split_factor is ", split,
          "; it must divide the batch of ", left.size(0));
      COMPUTE {
        const auto fp32 =
            at::bmm(cube(left).to(at::kFloat), cube(right).to(at::kFloat)).transpose(0, 1);
        out.copy_(split == 1 ? fp32 : fp32.reshape({fp32.size(0), split, -1}).transpose(0, 1));
      };
    })
CHECKED(aclnnTransposeBatchMatMulWeightNz,
    (Tensor x, Weight weight, Opt<Tensor> bias, Opt<Tensor> scale, Ints perm_x, Ints perm_weight,
        Ints perm_y, CubeMath cube, int64_t split, Tensor out),
    {
      return body_aclnnTransposeBatchMatMul(
          x, weight, bias, scale, perm_x, perm_weight, perm_y, cube, split, out);
    })

// torch._transform_bias_rescale_qkv, of nn.MultiheadAttention: [batch, tokens, 3 x heads x D] with
// its bias to query, key and value [batch, heads, tokens, D]; the query is divided by sqrt(D).
CHECKED(aclnnTransformBiasRescaleQkv,
    (Tensor qkv, Tensor bias, int64_t heads, Tensor query, Tensor key, Tensor value), {
      require(heads > 0, "num_heads is ", heads);
      multiple("the last dimension of qkv", qkv.size(2), 3 * heads);
      for (const auto& [name, x] :
          {std::pair{"q", &query}, std::pair{"k", &key}, std::pair{"v", &value}})
        shape(name, *x, {qkv.size(0), heads, qkv.size(1), qkv.size(2) / 3 / heads});
      COMPUTE {
        const auto parts = (qkv.to(at::kFloat) + bias.to(at::kFloat))
                               .view({qkv.size(0), qkv.size(1), 3, heads, -1})
                               .permute({2, 0, 3, 1, 4});
        query.copy_(parts[0] / std::sqrt(static_cast<double>(query.size(3))));
        key.copy_(parts[1]);
        value.copy_(parts[2]);
      };
    })
