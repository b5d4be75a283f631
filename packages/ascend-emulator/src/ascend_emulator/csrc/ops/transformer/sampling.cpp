// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Sampling. Rules: torch_npu's documentation of npu_top_k_top_p and npu_top_k_top_p_sample
// (torch_npu/_op_plugin_docs.py) and the golden functions of op-plugin's test_npu_top_k_top_p.py
// and test_top_k_top_p_sample.py; argument order: op-plugin's call sites.
#include "ops/random.h"

namespace {

using namespace emu;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMostK = 1024;

struct Sampling {
  Tensor logits, top_k, top_p;
  Opt<Tensor> q, min_p;
  double epsilon;
  bool wants_logits;
  int64_t input_order, most_k = kMostK;
  bool normalizes = true, leaves_sampling = false;  // the caller samples from `probabilities`
  Tensor chosen, selected;
  Opt<Tensor> indices, probabilities;

  void run() {
    const int64_t batch = logits.size(0), words = logits.size(1),
                  limit = std::min({(most_k + 7) / 8 * 8, kMostK, words});
    const float absent = normalizes ? -kInfinity : 0;
    if (wants_logits) selected.fill_(absent);
    if (leaves_sampling) {
      indices->zero_();
      probabilities->zero_();
    }
    const auto ks = top_k.to(at::kLong).contiguous();
    const auto ps = top_p.to(at::kFloat).contiguous(),
               mins =
                   min_p ? min_p->to(at::kFloat).contiguous() : at::full({batch}, -1, at::kFloat);
    for (int64_t i = 0; i < batch; ++i) {
      const auto row = logits[i].to(at::kFloat);
      const int64_t k = ks.const_data_ptr<int64_t>()[i];
      const float p = ps.const_data_ptr<float>()[i], least = mins.const_data_ptr<float>()[i];
      const bool by_k = k >= 1 && k <= limit, by_p = p < 1;
      auto [values, places] = row.sort(/*stable=*/true, -1, /*descending=*/true);
      if (by_k) {
        values = values.narrow(0, 0, k);
        places = places.narrow(0, 0, k);
      }
      auto shares = normalizes ? at::softmax(values, -1) : values;
      if (!by_k && !by_p && least < 1) {  // no sort needed
        places = at::arange(words);
        shares = normalizes ? at::softmax(row, -1) : row;
      }
      if (by_p) {
        const int64_t kept =
            p > 0 ? std::max<int64_t>(1, ((shares.cumsum(-1) - shares) < p).sum().item<int64_t>())
                  : 1;
        shares = shares.narrow(0, 0, kept);
        places = places.narrow(0, 0, kept);
        if (p <= 0 && normalizes) shares = at::ones_like(shares);
      }
      if (least >= 1) {
        shares = shares.narrow(0, 0, 1);
        places = places.narrow(0, 0, 1);
      } else if (least > 0) {
        const auto kept = (shares >= shares.max() * least).nonzero().squeeze(-1);
        shares = shares.index_select(0, kept);
        places = places.index_select(0, kept);
      }
      if (leaves_sampling) {
        (*indices)[i].narrow(0, 0, places.size(0)).copy_(places);
        (*probabilities)[i].narrow(0, 0, places.size(0)).copy_(shares);
      } else {
        const auto drawn =
            q ? shares / ((*q)[i].narrow(0, 0, shares.size(0)).abs() + epsilon) : shares;
        chosen[i].copy_(places[drawn.argmax()]);
      }
      if (wants_logits) selected[i].index_copy_(0, places, row.index_select(0, places));
    }
  }
};

struct SamplingV1 : Sampling {
  FIELDS(logits, top_k, top_p, q, epsilon, wants_logits, input_order, chosen, selected)
};
struct SamplingV2 : Sampling {
  FIELDS(logits, top_k, top_p, q, min_p, epsilon, wants_logits, input_order, most_k, normalizes,
      leaves_sampling, chosen, selected, indices, probabilities)
};

}  // namespace

CHECKED(aclnnApplyTopKTopP, (Tensor logits, Opt<Tensor> p, Opt<Tensor> k, Tensor out), {
  COMPUTE {
    auto [values, places] = logits.to(at::kFloat).sort(/*stable=*/true, -1, /*descending=*/false);
    if (k) {
      const auto count = k->to(at::kLong);
      if (count.numel()) {
        const auto [least, most] = count.aminmax();
        const int64_t limit = std::min(kMostK, logits.size(1));
        rule("apply_top_k_top_p.k-values",
            least.item<int64_t>() >= 1 && most.item<int64_t>() <= limit, "k has values from ",
            least.item<int64_t>(), " to ", most.item<int64_t>(), "; allowed: 1 to ", limit);
      }
      values.masked_fill_(
          values < values.gather(1, (logits.size(1) - count).unsqueeze(1)), -kInfinity);
    }
    if (p) {
      auto masked_out = at::softmax(values, -1).cumsum(-1) <= (1 - p->to(at::kFloat)).unsqueeze(1);
      masked_out.select(1, -1).fill_(false);
      values.masked_fill_(masked_out, -kInfinity);
    }
    out.copy_(at::empty_like(values).scatter_(1, places, values));
  };
})

CHECKED(aclnnTopKTopPSample, (SamplingV1 call), {
  COMPUTE { call.run(); };
})
CHECKED(aclnnTopKTopPSampleV2, (SamplingV2 call), {
  COMPUTE { call.run(); };
})

// npu_sim_exponential_: of (seed, offset).
CHECKED(aclnnSimThreadExponential,
    (Tensor self, int64_t count, double lambda, int64_t seed, int64_t offset), {
      require(lambda > 0, "lambd is ", lambda, "; it must be positive");
      require(count == self.numel(), "count is ", count, " for ", self.numel(), " numbers");
      COMPUTE { self.exponential_(lambda, generator(seed, offset)); };
    })
