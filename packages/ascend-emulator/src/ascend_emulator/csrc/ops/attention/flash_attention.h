// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Training attention, forward and backward; also torch.nn.functional.scaled_dot_product_attention.
// Rules: torch_npu's documentation of npu_fusion_attention, _v2 and _v3
// (torch_npu/_op_plugin_docs.py); argument order: op-plugin's call sites.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "attention.h"

namespace emu::attention {

inline Opt<Tensor> filled(const Opt<Tensor>& x) { return x && x->numel() ? x : std::nullopt; }

// Arguments of all versions. The FIELDS of a derived struct are those that a version has, in order.
struct FlashInputs {
  Tensor query, key, value;
  Opt<Tensor> query_rope, key_rope, pse, drop_mask, padding_mask, mask;
};
struct FlashSettings {
  double scale, keep;
  int64_t before, after, heads;
  Text layout;
  int64_t inner_precise, sparse_mode;
  FIELDS(scale, keep, before, after, heads, layout, inner_precise, sparse_mode)
};
struct Ends {
  Opt<Ints> query_ends, kv_ends;
  FIELDS(query_ends, kv_ends)
};
struct Starts {
  Opt<Ints> query_first, key_first;
  FIELDS(query_first, key_first)
};
// Version 1 adds pse before scaling: pse_type 1.
struct FlashOptions {
  Opt<Ints> prefix;
  Ends ends{};
  Starts starts{};
  int64_t pse_type = 1;
  Text stats_layout{};
  Opt<Tensor> sink{};
};

struct Flash : FlashInputs, FlashSettings, FlashOptions {
  Tensor most, sum;  // [B, N, S, 8], or [T, N, 8]: concatenated requests [N, S, 8], unless
                     // softmax_layout is the input's

  int64_t groups = 0, batch = 0;
  struct Span {
    int64_t start, count, kv_start, kv_count, drop_start;
  };
  std::vector<Span> spans;

  Flash& checked() {
    for (char& c : layout) c = std::toupper(c);
    one_of<Text>("input_layout", layout, {"BSH", "SBH", "BSND", "BNSD", "TND"});
    for (auto* x : {&pse, &drop_mask, &mask, &query_rope, &key_rope, &sink}) *x = filled(*x);
    rule("fusion_attention.keep-prob", keep > 0 && keep <= 1, "keep_prob is ", keep,
        "; allowed: above 0 up to 1");
    const bool varlen = layout == "TND", flat = layout == "BSH" || layout == "SBH";
    for (const auto& [name, x] :
        {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}})
      rank(name, *x, varlen || flat ? 3 : 4);
    const int64_t size = query.size(-1) / (flat ? heads : 1);
    rule("fusion_attention.head-size", [&] { within("the head size", size, 1, 768); });
    groups = flat ? key.size(2) / size : key.size(layout == "BSND" ? 2 : 1);
    // "Dq = Dk, Dk >= Dv", and the same batch and heads
    rule("fusion_attention.shapes",
        (flat ? heads * size == query.size(2) && groups * size == key.size(2) &&
                    value.size(2) % std::max<int64_t>(groups, 1) == 0
              : heads == query.size(layout == "BSND" ? 2 : 1) && key.size(-1) == size) &&
            key.sizes().slice(0, key.dim() - 1) == value.sizes().slice(0, key.dim() - 1) &&
            value.size(-1) <= key.size(-1) &&
            (varlen || batch_of(key, layout) == batch_of(query, layout)),
        "query has shape ", query.sizes(), ", key ", key.sizes(), " and value ", value.sizes(),
        " in layout ", layout, " with ", heads,
        " heads; query and key must have the same batch and head size, key and value the same "
        "shape");
    rule("fusion_attention.groups", groups > 0 && heads % groups == 0, heads, " heads over ",
        groups, " key-value heads; a multiple is allowed");
    rule("fusion_attention.sparse-mode", [&] {
      within("sparse_mode", sparse_mode, 0, varlen ? 8 : 6);
      require(!varlen || sparse_mode != 5, "sparse_mode 5 is not supported in layout TND");
    });
    if (mask && (sparse_mode == 2 || sparse_mode == 3 || sparse_mode == 4 || sparse_mode > 6))
      require(mask->size(-1) == kMaskSide && mask->size(-2) == kMaskSide, "sparse_mode ",
          sparse_mode, " needs an atten_mask of 2048 x 2048, not ", mask->sizes());
    if (mask && sparse_mode == 6) shape("atten_mask", *mask, {3072, kMaskSide});
    require(query_rope.has_value() == key_rope.has_value(),
        "query_rope and key_rope must be given together");
    require(!query_rope || (varlen && mask && !pse && !drop_mask),
        "query_rope needs layout TND and atten_mask, and goes with no pse and no dropout");
    within("pse_type", pse_type, 0, 3);
    if (sink) {
      shape("sink", *sink, {heads});
      one_of("sink", *sink, {at::kFloat});
    }
    if (varlen) {
      require(ends.query_ends && ends.kv_ends && ends.query_ends->size() == ends.kv_ends->size(),
          "layout TND needs actual_seq_qlen and actual_seq_kvlen of the same length");
      batch = ends.query_ends->size();
      rule("fusion_attention.packed-requests", batch <= 1024, "actual_seq_qlen has ", batch,
          " entries in layout TND; at most 1024 are allowed");
    } else {
      batch = batch_of(query, layout);
      rule("fusion_attention.batch", [&] { within("the batch", batch, 0, 2 << 20); });
    }
    rule("fusion_attention.tokens", [&] {
      const int64_t queries = length_of(query, layout), keys = length_of(key, layout);
      require(std::max(queries, keys) <= 1 << 20, "query has ", queries, " tokens and key ", keys,
          "; at most 2^20 are allowed");
    });
    int64_t drop_start = 0;
    for (int64_t i = 0; i < batch; ++i) {
      Span span{0, 0, 0, 0, drop_start};
      if (varlen) {
        const auto part = [&](const Ints& ends, int64_t& start) {
          start = i ? ends[i - 1] : 0;
          return ends[i] == 0 ? 0
                              : ends[i] - start;  // "trailing requests that take no part have 0"
        };
        span.count = part(*ends.query_ends, span.start);
        span.kv_count = part(*ends.kv_ends, span.kv_start);
        require(span.count >= 0 && span.kv_count >= 0 && span.start + span.count <= query.size(0) &&
                    span.kv_start + span.kv_count <= key.size(0),
            "actual_seq_qlen or actual_seq_kvlen of request ", i,
            " decreases, or is more than query and key hold");
      } else {
        span.count = length_of(query, layout);
        span.kv_count = length_of(key, layout);
      }
      drop_start += heads * span.count * span.kv_count;
      spans.push_back(span);
    }
    check_mask_and_bias();
    check_band();
    if (drop_mask && keep < 1)
      require(drop_mask->numel() * 8 >= drop_start, "the dropout mask has ", drop_mask->numel() * 8,
          " bits for ", drop_start, " scores");
    return *this;
  }

  // "BNSS, B1SS, 11SS, SS; in TND SS, of the longest query and key"; pse "BNSS, BN1S, 1NSS";
  // "prefix from max(0, Skv - Sq) to Skv, a batch of at most 32".
  void check_mask_and_bias() const {
    int64_t queries = 0, keys = 0;
    for (const auto& span : spans) {
      queries = std::max(queries, span.count);
      keys = std::max(keys, span.kv_count);
    }
    const auto fits =
        [&](const Tensor& x,
            int64_t of_heads) {  // [B, of_heads, rows, keys], or 1 for each of the first two
          return x.dim() == 4 && (x.size(0) == 1 || x.size(0) == batch) &&
                 (x.size(1) == 1 || x.size(1) == of_heads) && x.size(3) == keys;
        };
    if (mask && (sparse_mode < 2 || sparse_mode == 5))
      rule("fusion_attention.mask-shape", [&] {
        const bool plain = mask->dim() == 2 && sparse_mode != 5,
                   ends = plain && mask->size(0) == queries && mask->size(1) == keys;
        if (layout == "TND")
          return require(plain && mask->size(0) >= queries && mask->size(1) >= keys,
              "atten_mask has shape ", mask->sizes(), " in layout TND; allowed: [", queries, ", ",
              keys, "], of the longest query and key");
        require(ends || (fits(*mask, heads) && mask->size(2) == queries &&
                            (mask->size(0) == batch || mask->size(1) == 1)),
            "atten_mask has shape ", mask->sizes(), "; allowed: [", batch, ", ", heads, " or 1, ",
            queries, ", ", keys, "]",
            sparse_mode == 5 ? "" : ", and the same without or with 1 in place of the first two");
      });
    if (mask && (sparse_mode == 5 || sparse_mode == 6))
      rule("fusion_attention.prefix", [&] {
        require(batch <= 32 && prefix && static_cast<int64_t>(prefix->size()) == batch,
            "sparse_mode ", sparse_mode,
            " needs a prefix for each of at most 32 requests; there are ",
            prefix ? prefix->size() : 0, " for ", batch);
        for (int64_t i = 0; i < batch; ++i)
          within("prefix", (*prefix)[i], std::max<int64_t>(0, spans[i].kv_count - spans[i].count),
              spans[i].kv_count);
      });
    if (!pse) return;
    rule("fusion_attention.pse", [&] {
      require(sparse_mode < 7, "pse is given with sparse_mode ", sparse_mode,
          "; it is supported with 0 to 6");
      for (const auto& span : spans)
        require(span.count > 0, "pse is given, and a request has no query tokens");
    });
    if (pse_type >= 2)
      return require(pse->numel() == heads * (pse->dim() == 2 ? batch : 1), "pse has shape ",
          pse->sizes(), " with pse_type ", pse_type, "; allowed: [", heads, "] and [", batch, ", ",
          heads, "]");
    rule("fusion_attention.pse-dtype", [&] { same_dtype("pse", *pse, "query", query); });
    require_emulated(layout != "TND", "pse of pse_type ", pse_type,
        " in layout TND is not emulated; 2 and 3 are");
    require_emulated(queries <= 1024 || pse->dim() != 4 || pse->size(2) != 1024 || queries == 1024,
        "pse of shape ", pse->sizes(), ", compressed to 1024 rows, is not emulated");
    rule("fusion_attention.pse-shape",
        fits(*pse, heads) && pse->size(1) == heads &&
            (pse->size(2) == 1 || pse->size(2) == queries),
        "pse has shape ", pse->sizes(), "; allowed: [", batch, " or 1, ", heads, ", ", queries,
        " or 1, ", keys, "]");
  }

  // The tokens before and after, where they have an effect: sparse_mode 0, and 7 and 8 in the last
  // and the first request.
  void check_band() const {
    if (!mask || batch == 0) return;
    rule("fusion_attention.band", [&] {
      if (sparse_mode == 7 || sparse_mode == 8) {
        const int64_t keys = spans[sparse_mode == 7 ? batch - 1 : 0].kv_count;
        require(before >= keys && (sparse_mode == 8 || after <= 0), "pre_tockens is ", before,
            " and next_tockens ", after, " with sparse_mode ", sparse_mode, " and ", keys,
            " keys; allowed: at least the keys, and with sparse_mode 7 at most 0");
      }
      for (const auto& span : spans)
        require(
            sparse_mode != 0 || ((after >= 0 || (before >= -after && -after < span.kv_count)) &&
                                    (before >= 0 || (after >= -before && -before < span.count))),
            "pre_tockens is ", before, " and next_tockens ", after, " for ", span.count,
            " query tokens and ", span.kv_count, " keys; they leave no band");
    });
  }

  void leave_out_of(Request& request, int64_t i) const {
    if (!mask)
      return;  // "without atten_mask, sparse_mode and the tokens before and after have no effect"
    Sparse sparse{sparse_mode, INT64_MAX, INT64_MAX, *mask, prefix.value_or(Ints())};
    const auto last = [&] {  // last active request
      int64_t found = batch - 1;
      while (found > 0 && spans[found].count == 0) --found;
      return found;
    };
    if (sparse_mode == 7) sparse.mode = i == last() ? 4 : 3;
    if (sparse_mode == 8) sparse.mode = i == 0 ? 4 : 2;
    if (sparse.mode == 0 || sparse.mode == 4) {
      sparse.before = before;
      sparse.after = after;
    }
    if (sparse_mode == 5) {
      sparse.mode = 1;  // the whole mask is given
    }
    apply_sparse_mode(request, sparse, i);
  }

  // Bias of the scaled scores, [heads or 1, queries or 1, keys]: npu_fusion_attention_v2,
  // "pse_type".
  Tensor bias_of(int64_t i, const Span& span) const {
    if (!pse) return {};
    const auto fp32 = pse->to(at::kFloat);
    if (pse_type >= 2) {
      const auto slopes = (fp32.dim() == 2 ? fp32[i] : fp32).view({heads, 1, 1});
      const int64_t shift =
          (starts.query_first && !starts.query_first->empty() ? starts.query_first->front() : 0) -
          (starts.key_first && !starts.key_first->empty() ? starts.key_first->front() : 0);
      auto distance =
          (at::arange(span.kv_count).unsqueeze(0) - at::arange(span.count).unsqueeze(1) - shift)
              .abs()
              .to(at::kFloat);
      if (pse_type == 3) distance = distance.sqrt();
      return -slopes * distance;
    }
    const auto used = fp32[fp32.size(0) == 1 ? 0 : i];
    return pse_type == 1 ? used * scale : used;
  }

  // Scaled dropout mask from a request's bits [heads, queries, keys], lowest bit first.
  Tensor drop_of(const Span& span) const {
    if (!drop_mask || keep >= 1) return {};
    const int64_t count = heads * span.count * span.kv_count;
    const auto place = at::arange(span.drop_start, span.drop_start + count);
    const auto bits = drop_mask->view(-1)
                          .index_select(0, at::floor_divide(place, 8))
                          .to(at::kInt)
                          .bitwise_right_shift(place.remainder(8).to(at::kInt))
                          .bitwise_and(1);
    return bits.to(at::kFloat).mul_(1 / keep).view({heads, span.count, span.kv_count});
  }

  Request request_of(int64_t i, const Span& span) const {
    const auto part = [&](const Tensor& x, int64_t start, int64_t count, int64_t n) {
      return tokens(x, layout, i, start, count, n);
    };
    auto q = part(query, span.start, span.count, heads),
         k = part(key, span.kv_start, span.kv_count, groups);
    if (query_rope) {
      q = at::concat({q, part(*query_rope, span.start, span.count, heads)}, -1);
      k = at::concat({k, part(*key_rope, span.kv_start, span.kv_count, groups)}, -1);
    }
    Request request{q, k, part(value, span.kv_start, span.kv_count, groups), {}, bias_of(i, span),
        sink.value_or(Tensor()), scale, drop_of(span)};
    leave_out_of(request, i);
    return request;
  }

  // A request's part of softmax_max or softmax_sum, [heads, queries, 8].
  Tensor stats_of(const Tensor& x, int64_t i, const Span& span) const {
    if (layout != "TND") return x[i];
    if (stats_layout == "same_as_input" || stats_layout == "TND")
      return x.narrow(0, span.start, span.count).transpose(0, 1);
    return x.view({-1, x.size(-1)})
        .narrow(0, span.start * heads, span.count * heads)
        .view({heads, span.count, x.size(-1)});
  }

  void forward(Tensor out) const {
    const bool keeps = most.defined() && most.numel();
    for (int64_t i = 0; i < batch; ++i) {
      const auto& span = spans[i];
      if (span.count == 0) continue;
      const auto request = request_of(i, span);
      auto target = tokens(out, layout, i, span.start, span.count, heads);
      if (span.kv_count == 0) {
        target.zero_();
        if (keeps) {
          stats_of(most, i, span).fill_(std::numeric_limits<float>::lowest());
          stats_of(sum, i, span).zero_();
        }
        continue;
      }
      const auto result = keeps ? attend_fp32(request) : attend(request);
      target.copy_(result.out);
      if (!keeps) continue;
      stats_of(most, i, span)
          .copy_(result.most.unsqueeze(-1).expand({heads, span.count, most.size(-1)}));
      const auto sums = (result.lse - result.most)
                            .exp_()
                            .masked_fill_(result.lse == std::numeric_limits<float>::infinity(), 0);
      stats_of(sum, i, span).copy_(sums.unsqueeze(-1).expand({heads, span.count, sum.size(-1)}));
    }
  }

  struct Gradients {
    Tensor query_grad, key_grad, value_grad;
    Opt<Tensor> query_rope_grad, key_rope_grad, pse_grad, sink_grad;
  };
  void backward(const Tensor& grad, const Tensor& out, Gradients to) const {
    for (auto* x : {&to.key_grad, &to.value_grad, &to.query_grad}) x->zero_();
    const int64_t share = heads / groups;
    auto pse_grad =
        filled(to.pse_grad) && pse ? at::zeros(to.pse_grad->sizes(), at::kFloat) : Tensor();
    auto sink_grad = sink && filled(to.sink_grad) ? at::zeros({heads}, at::kFloat) : Tensor();
    for (int64_t i = 0; i < batch; ++i) {
      const auto& span = spans[i];
      if (span.count == 0 || span.kv_count == 0) continue;
      const auto r = request_of(i, span);
      const auto part = [&](const Tensor& x) {
        return tokens(x, layout, i, span.start, span.count, heads);
      };
      const auto grads = part(grad), outs = part(out), masked_out = r.mask(),
                 most_of = stats_of(most, i, span), sum_of = stats_of(sum, i, span);
      const int64_t size = query_rope ? query.size(-1) : r.query.size(2);
      // One key head and its query heads at a time: the matrices of scores are [share, queries,
      // keys].
      for (int64_t group = 0; group < groups; ++group) {
        const auto own = [&](const Tensor& x) {
          return x.dim() < 3 || x.size(0) == 1 ? x : x.narrow(0, group * share, share);
        };
        const auto fp32 = [&](const Tensor& x) { return own(x).to(at::kFloat); };
        const auto spread = [&](const Tensor& x) {
          return x[group].to(at::kFloat).expand({share, -1, -1});
        };
        const auto q = fp32(r.query), k = spread(r.key), v = spread(r.value), g = fp32(grads),
                   o = fp32(outs);
        const auto largest = own(most_of).select(-1, 0).unsqueeze(-1),
                   total = own(sum_of).select(-1, 0).unsqueeze(-1);
        auto scores = at::bmm(q, k.transpose(1, 2)).mul_(scale);
        if (r.bias.defined()) scores.add_(own(r.bias));
        if (masked_out.defined())
          scores.masked_fill_(own(masked_out), -std::numeric_limits<float>::infinity());
        const auto weights = scores.sub_(largest).exp_().div_(total.masked_fill(total == 0, 1));
        const auto mean = (g * o).sum(-1, true);
        auto slope = at::bmm(g, v.transpose(1, 2));  // gradient of the scaled and biased scores
        if (r.drop.defined()) slope.mul_(own(r.drop));
        slope.sub_(mean).mul_(weights);
        const auto query_grad = at::bmm(slope, k).mul_(scale),
                   key_grad = at::bmm(slope.transpose(1, 2), q).mul_(scale).sum(0);
        if (r.drop.defined()) weights.mul_(own(r.drop));
        const auto value_grad = at::bmm(weights.transpose(1, 2), g).sum(0);
        const auto put_query = [&](const Tensor& into, const Tensor& x) {
          tokens(into, layout, i, span.start, span.count, heads)
              .narrow(0, group * share, share)
              .copy_(x);
        };
        const auto put_key = [&](const Tensor& into, const Tensor& x) {
          tokens(into, layout, i, span.kv_start, span.kv_count, groups)[group].copy_(x);
        };
        put_query(to.query_grad, query_grad.narrow(-1, 0, size));
        put_key(to.key_grad, key_grad.narrow(-1, 0, size));
        put_key(to.value_grad, value_grad);
        if (query_rope) {
          put_query(*to.query_rope_grad, query_grad.narrow(-1, size, q.size(2) - size));
          put_key(*to.key_rope_grad, key_grad.narrow(-1, size, q.size(2) - size));
        }
        if (sink_grad.defined()) {
          const auto heads_of = [&](const Tensor& x) { return x.narrow(0, group * share, share); };
          const auto share_of_sink =
              (heads_of(sink->view({heads, 1, 1})) - largest).exp_().div_(total);
          heads_of(sink_grad).sub_((share_of_sink * mean).sum({1, 2}));
        }
        if (pse_grad.defined() && pse_type < 2) {
          if (pse_type == 1) slope.mul_(scale);
          auto into = pse_grad[pse_grad.size(0) == 1 ? 0 : i];
          into = into.size(0) == 1 ? into : into.narrow(0, group * share, share);
          into.add_(at::sum_to(slope, into.sizes()));
        }
      }
    }
    if (pse_grad.defined()) to.pse_grad->copy_(pse_grad);
    if (sink_grad.defined()) to.sink_grad->copy_(sink_grad);
  }
};

}  // namespace emu::attention
