// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's multi-head latent attention. Rules: torch_npu's documentation of
// npu_multi_head_latent_attention and npu_ring_mla (torch_npu/op_plugin/atb/_atb_api_docs.py) and
// the golden functions of op-plugin's test_atb_mla_*.py and test_atb_ring_mla.py.
#include "attention.h"

using namespace emu;
using namespace emu::transformer;

// One key head in two caches: the latent part, which is also the value, and the rope part.
ATB_OPERATOR(AtbMLA,
    (Tensor query, Tensor query_rope, Tensor latent, Tensor rope, Tensor table, Lengths kv_lengths,
        Opt<Tensor> mask, Lengths lengths, Opt<Tensor> query_scale, Opt<Tensor> value_scale,
        int64_t heads, float scale, int64_t groups, int mask_type, int calc_type, int cache_mode,
        Tensor out, Opt<Tensor> lse),
    {
      one_of<int>("cache_mode (1 krope_ctkv)", cache_mode, {1});
      one_of<int>("calc_type (0 undefined, 2 ring)", calc_type, {0, 2});
      one_of<int>("mask_type (0 undefined)", mask_type, {0});
      attention::refuse_given("a mask, qk_descale or pv_descale", mask, query_scale, value_scale);
      rank("q_nope", query, 3);
      rank("q_rope", query_rope, 3);
      require(query_rope.size(0) == query.size(0) && query_rope.size(1) == query.size(1),
          "q_nope has shape ", query.sizes(), " and q_rope ", query_rope.sizes());
      same_dtype("q_rope", query_rope, "q_nope", query);
      rank("ctkv", latent, 4);
      rank("k_rope", rope, 4);
      require(latent.sizes().slice(0, 3) == rope.sizes().slice(0, 3), "ctkv has shape ",
          latent.sizes(), " and k_rope ", rope.sizes());
      require(!lengths.value.defined() || lengths.value.numel() == kv_lengths.value.numel(),
          "qseqlen and context_lens have different lengths");
      Attention a(heads, groups ? groups : 1, scale);
      a.table = table;
      a.query_lengths = lengths;
      a.kv_lengths = kv_lengths;
      a.latent_values = latent.size(3);
      a.out = out;
      if (lse && lse->numel()) {
        require(lse->numel() == query.size(0) * heads, "lse has shape ", lse->sizes(),
            "; it must be [", query.size(0), ", ", heads, ", 1]");
        a.lse = *lse;
      }
      auto checked_call = a;  // for the checks at the call
      checked_call.query =
          at::empty({query.size(0), heads, latent.size(3) + rope.size(3)}, query.options());
      checked_call.key = at::empty(
          {1, latent.size(1), a.groups * (latent.size(3) + rope.size(3))}, latent.options());
      checked_call.prepared();
      COMPUTE {
        // Selects the pages in the block table, and renumbers them.
        const auto names = table.narrow(0, 0, kv_lengths.value.numel()).reshape(-1).to(at::kLong),
                   named = names.clamp(0, latent.size(0) - 1);
        a.query = at::concat({query, query_rope}, -1);
        const auto picked = std::get<0>(at::_unique2(named));
        a.key = at::concat({latent.index_select(0, picked), rope.index_select(0, picked)}, -1)
                    .flatten(2);
        a.table = at::searchsorted(picked, named, true)
                      .masked_fill_(names != named, -1)
                      .view({-1, table.size(1)});
        a.prepared()();
      };
    })

// seqlen [requests] or [2, requests]: of queries, and of keys. The previous partial result is an
// input with its log-sum-exp.
ATB_OPERATOR(AtbRingMLA,
    (Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Opt<Tensor>,
        Lengths lengths, Opt<Tensor> before, Opt<Tensor> before_lse, int64_t heads, int64_t groups,
        float scale, int, int mask_type, int, int calc_type, Tensor out, Tensor lse),
    {
      one_of<int>("mask_type (0 none, 1 triangular)", mask_type, {0, 1});
      one_of<int>("calc_type (0 default, 1 first ring)", calc_type, {0, 1});
      const bool first = calc_type == 1;
      require(first || (before && before_lse),
          "pre_out and prev_lse are required except for calc_type_first_ring");
      for (const auto& [name, x] :
          {std::pair<const char*, const Tensor*>{"q_nope", &query}, {"q_rope", &query_rope},
              {"k_nope", &key}, {"k_rope", &key_rope}, {"value", &value}}) {
        rank(name, *x, 3);
        one_of(name, *x, kHalves);
        same_dtype(name, *x, "q_nope", query);
      }
      require(query.size(1) == heads && key.size(1) == groups && value.size(1) == groups &&
                  heads % groups == 0,
          "q_nope has shape ", query.sizes(), ", k_nope ", key.sizes(), " and value ",
          value.sizes(), " for ", heads, " and ", groups, " heads");
      shape("output", out, {query.size(0), heads, value.size(2)});
      shape("softmax_lse", lse, {heads, query.size(0)});
      if (!first) {
        shape("pre_out", *before, out.sizes());
        shape("prev_lse", *before_lse, lse.sizes());
      }
      const auto& given = lengths.value;
      require(given.defined() && (given.dim() == 1 || (given.dim() == 2 && given.size(0) == 2)),
          "seqlen must be [requests] or [2, requests]");
      const auto counts = Lengths{given.dim() == 2 ? given[0] : given}(),
                 kv = Lengths{given.dim() == 2 ? given[1] : given}();
      int64_t all = 0, all_keys = 0;
      for (size_t i = 0; i < kv.size(); ++i) {
        require(counts[i] >= 0 && kv[i] >= 0, "seqlen has negative entries");
        all += counts[i];
        all_keys += kv[i];
      }
      require(all <= query.size(0) && all_keys <= key.size(0), "seqlen sums to ", all,
          " queries and ", all_keys, " keys, ; the tensors have ", query.size(0), " and ",
          key.size(0));
      COMPUTE {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        const auto queries = at::concat({query, query_rope}, -1),
                   keys = at::concat({key, key_rope}, -1);
        int64_t start = 0, kv_start = 0;
        for (size_t i = 0; i < kv.size(); ++i) {
          attention::Request request;
          request.query = queries.narrow(0, start, counts[i]).transpose(0, 1);
          request.key = keys.narrow(0, kv_start, kv[i]).transpose(0, 1);
          request.value = value.narrow(0, kv_start, kv[i]).transpose(0, 1);
          request.scale = scale;
          // Aligned at the upper left corner, as in the golden function
          // (test_ring_mla_bf16_512_mask_is_ring_out).
          request.causal = mask_type == 1;
          auto result = attention::attend(request);
          result.out = result.out.to(at::kFloat);
          if (!first) {
            const auto part = [&](const Tensor& x) {
              return x.narrow(1, start, counts[i]).to(at::kFloat);
            };
            const auto old_lse = part(*before_lse),
                       new_lse = result.lse.masked_fill(result.lse == kInfinity, -kInfinity),
                       total = at::logaddexp(old_lse, new_lse);
            result.out = part(before->transpose(0, 1)) * (old_lse - total).exp().unsqueeze(-1) +
                         result.out * (new_lse - total).exp().unsqueeze(-1);
            result.lse = total;
          }
          out.narrow(0, start, counts[i]).copy_(result.out.transpose(0, 1));
          lse.narrow(1, start, counts[i]).copy_(result.lse);
          start += counts[i];
          kv_start += kv[i];
        }
      };
    })
