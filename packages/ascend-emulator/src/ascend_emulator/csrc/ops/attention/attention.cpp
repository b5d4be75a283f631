// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "attention.h"

#include <ATen/Parallel.h>

namespace emu::attention {
namespace {

constexpr int64_t kMostScores = 1 << 24;  // limits the memory of a long prompt's scores
constexpr int64_t kCausalRows = 64;       // query rows per step, with the keys up to the last row

}  // namespace

Tensor mask_of_request(
    const Tensor& mask, bool by_request, int64_t request, int64_t queries, int64_t keys) {
  auto own = mask;
  if (own.dim() == 4) own = own[own.size(0) == 1 ? 0 : request];  // [B or 1, 1 or N, queries, keys]
  if (own.dim() == 3 && own.size(0) == 1) own = own[0];           // [1, queries, keys]
  if (own.dim() == 2 && by_request && own.size(0) != 1)
    own = own.narrow(0, request, 1);  // [B, keys]
  require(own.size(-2) >= queries && own.size(-1) >= keys, "atten_mask of shape ", mask.sizes(),
      " is smaller than ", queries, " queries x ", keys, " keys");
  return own.narrow(-2, 0, queries).narrow(-1, 0, keys);
}

Tensor masked_out(const Sparse& sparse, int64_t request, int64_t queries, int64_t keys) {
  const auto difference = [&] {
    return at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1);
  };  // key position - query position
  const auto outside = [&](const Tensor& d) {
    return at::logical_or(d > std::min<int64_t>(sparse.after, INT32_MAX),
        d < -std::min<int64_t>(sparse.before, INT32_MAX));
  };
  switch (sparse.mode) {
    case 0:
    case 1: {
      if (!sparse.mask.defined()) return {};
      const auto given =
          mask_of_request(sparse.mask, sparse.mask_by_request, request, queries, keys)
              .to(at::kBool);
      const bool band = sparse.mode == 0 && (sparse.before < queries || sparse.after < keys);
      return band ? at::logical_or(given, outside(difference())) : given;
    }
    case 2: return difference() > 0;
    case 3: return queries == 1 ? Tensor() : difference() > keys - queries;
    case 4: return outside(difference() - (keys - queries));
    case 5:
    case 6:
      return at::logical_and(
          difference() > keys - queries, at::arange(keys).unsqueeze(0) >= sparse.prefix[request]);
  }
  raise(kOpParam, {"sparse_mode ", sparse.mode, "; supported: 0 to 6"});
}

void count_mask(const Sparse& sparse, int64_t queries, int64_t keys) {
  // Kernels read a compressed mask up to a request's keys only.
  if (sparse.mode >= 2 && sparse.mask.defined())
    cost::partial_access(
        sparse.mask, static_cast<double>(queries * std::min(keys, kMaskSide) * (queries > 1)));
}

void apply_sparse_mode(Request& r, const Sparse& sparse, int64_t index) {
  count_mask(sparse, r.query.size(1), r.key.size(1));
  r.causal = sparse.mode == 2 || (sparse.mode == 3 && r.query.size(1) == r.key.size(1));
  if (!r.causal) r.masked_out = masked_out(sparse, index, r.query.size(1), r.key.size(1));
}

Tensor Request::mask() const {
  return causal ? attention::masked_out({2}, 0, query.size(1), key.size(1)) : masked_out;
}

void count_products(const Tensor& query, int64_t keys, int64_t value_width, bool causal) {
  const auto queries = static_cast<double>(query.size(1)),
             both = std::min(queries, static_cast<double>(keys));
  const double pairs = causal ? both * (both + 1) / 2 + (queries - both) * static_cast<double>(keys)
                              : queries * static_cast<double>(keys);
  cost::add_flops(2 * static_cast<double>(query.size(0)) * pairs *
                      static_cast<double>(query.size(2) + value_width),
      static_cast<int>(query.element_size()));
}

// Needed for a bias, a sink, or different key and value sizes.
AttentionResult attend_fp32(const Request& r) {
  count_products(r.query, r.key.size(1), r.value.size(2), r.causal);
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kLowest = std::numeric_limits<float>::lowest();
  const int64_t heads = r.query.size(0), queries = r.query.size(1), groups = r.key.size(0),
                share = heads / groups, keys = r.key.size(1);
  const auto key = r.key.to(at::kFloat).transpose(1, 2).contiguous(),
             value = r.value.to(at::kFloat).contiguous();
  AttentionResult result{at::empty({heads, queries, value.size(2)}, key.options()),
      at::empty({heads, queries}, key.options()), at::empty({heads, queries}, key.options())};
  const int64_t step = std::min(r.causal ? kCausalRows : INT64_MAX,
      std::max<int64_t>(1, kMostScores / std::max<int64_t>(1, heads * keys)));
  for (int64_t first = 0; first < queries; first += step) {
    const int64_t count = std::min(step, queries - first);
    const int64_t seen = r.causal ? std::min(keys, first + count) : keys;
    const auto rows = [&](const Tensor& x) { return x.narrow(-2, first, count); };
    const auto part = [&](const Tensor& x) {
      return (x.size(-2) == 1 ? x : rows(x)).narrow(-1, 0, seen);
    };
    auto scores =
        at::bmm(rows(r.query).to(at::kFloat).reshape({groups, share * count, r.query.size(2)}),
            key.narrow(2, 0, seen))
            .mul_(r.scale)
            .view({heads, count, seen});
    if (r.bias.defined()) scores.add_(part(r.bias));
    if (r.causal && seen > first)
      scores.narrow(2, first, seen - first)
          .masked_fill_(masked_out({2}, 0, count, seen - first), -kInfinity);
    if (r.masked_out.defined()) scores.masked_fill_(part(r.masked_out), -kInfinity);
    auto most = scores.amax(-1, true);
    if (r.sink.defined()) most = at::maximum(most, r.sink.to(at::kFloat).view({heads, 1, 1}));
    most.clamp_(kLowest);
    auto weights = scores.sub_(most).exp_();
    auto sum = weights.sum(-1, true);
    if (r.sink.defined()) sum.add_(r.sink.to(at::kFloat).view({heads, 1, 1}).sub(most).exp_());
    if (r.drop.defined()) weights.mul_(part(r.drop));
    const auto out = at::bmm(weights.view({groups, share * count, seen}), value.narrow(1, 0, seen))
                         .view({heads, count, value.size(2)});
    const auto fully_masked = sum == 0;
    result.out.narrow(1, first, count).copy_(out.div_(sum.masked_fill(fully_masked, 1)));
    result.lse.narrow(1, first, count)
        .copy_(sum.log().add_(most).masked_fill_(fully_masked, kInfinity).squeeze(-1));
    result.most.narrow(1, first, count).copy_(most.squeeze(-1));
  }
  return result;
}

AttentionResult attend(const Request& r) {
  const int64_t heads = r.query.size(0), queries = r.query.size(1), groups = r.key.size(0),
                share = heads / groups;
  if (queries == 0 || r.key.size(1) == 0)
    return {at::zeros({heads, queries, r.value.size(2)}, at::kFloat),
        at::full({heads, queries}, std::numeric_limits<float>::infinity(), at::kFloat)};
  if (r.bias.defined() || r.sink.defined() || r.drop.defined() ||
      (r.masked_out.defined() && r.masked_out.dim() == 3) || r.value.size(2) != r.key.size(2) ||
      r.query.scalar_type() != r.key.scalar_type())
    return attend_fp32(r);
  auto q = r.query.unsqueeze(0), k = r.key.unsqueeze(0), v = r.value.unsqueeze(0);
  if (queries == 1 && !r.masked_out.defined() && !r.causal) {
    q = r.query.reshape({1, groups, share, r.query.size(2)});  // the heads of a group share keys
  } else if (share > 1) {
    const auto spread = [&](const Tensor& x) {
      return x.unsqueeze(2)
          .expand({1, groups, share, x.size(2), x.size(3)})
          .reshape({1, heads, x.size(2), x.size(3)});
    };
    k = spread(k);
    v = spread(v);
  }
  Opt<Tensor> added;
  Tensor nothing;
  if (r.masked_out.defined()) {
    added = at::zeros(r.masked_out.sizes(), at::kFloat)
                .masked_fill_(r.masked_out, -std::numeric_limits<float>::infinity());
    const auto fully_masked = r.masked_out.all(-1);
    if (fully_masked.any().item<bool>()) nothing = fully_masked.unsqueeze(0);
  }
  auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, r.causal, added, r.scale);
  AttentionResult result{
      out.reshape({heads, queries, r.value.size(2)}), lse.reshape({heads, queries})};
  // ATen's result for a row whose scores are all NaN is that of a fully masked one: 0, with the
  // logarithm 0.
  auto empty_rows = result.lse == 0;
  if (nothing.defined()) empty_rows.masked_fill_(nothing, false);
  if (empty_rows.any().item<bool>()) return attend_fp32(r);
  count_products(r.query, r.key.size(1), r.value.size(2), r.causal);
  if (nothing.defined()) {
    result.out.masked_fill_(nothing.unsqueeze(-1), 0);
    result.lse = result.lse.masked_fill(nothing, std::numeric_limits<float>::infinity());
  }
  return result;
}

Tensor tokens(const Tensor& x, const std::string& layout, int64_t request, int64_t start,
    int64_t count, int64_t heads) {
  if (layout == "TND") return x.narrow(0, start, count).transpose(0, 1);
  if (layout == "NTD" || layout == "NSD") return x.narrow(1, start, count);
  if (layout == "BNSD") return x[request].narrow(1, start, count);
  if (layout == "NBSD") return x.select(1, request).narrow(1, start, count);
  if (layout == "BSND") return x[request].narrow(0, start, count).transpose(0, 1);
  if (layout == "SBH")
    return x.select(1, request).narrow(0, start, count).unflatten(-1, {heads, -1}).transpose(0, 1);
  require(layout == "BSH", "input_layout ", layout, " is unknown");
  return x[request].narrow(0, start, count).unflatten(-1, {heads, -1}).transpose(0, 1);
}

int64_t batch_of(const Tensor& x, const std::string& layout) {
  return layout == "NSD" ? 1 : x.size(layout == "NBSD" || layout == "SBH" ? 1 : 0);
}

int64_t length_of(const Tensor& x, const std::string& layout) {
  return x.size(layout == "BNSD" || layout == "NBSD" ? 2
                : layout == "TND" || layout == "SBH" ? 0
                                                     : 1);
}

void check_block(const Tensor& cache, int64_t block) {
  require(block >= 0 && block < cache.size(0), "block_table names block ", block, " of ",
      cache.size(0));
}

Tensor pages(const Tensor& cache, const Tensor& table, int64_t request, int64_t length,
    int64_t groups, int64_t block_size) {
  const auto* row = table.const_data_ptr<int32_t>() + request * table.size(1);
  const int64_t count = std::max<int64_t>(1, (length + block_size - 1) / block_size);
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block =
        length ? row[i] : 0;  // without tokens: an empty part of a page, whatever the table has
    check_block(cache, block);
    const auto page = cache[block];
    const int64_t used = std::min(block_size, length - i * block_size);
    if (page.dim() == 2)
      parts.push_back(page.narrow(0, 0, used).unflatten(1, {groups, -1}).transpose(0, 1));
    else if (page.dim() == 3) parts.push_back(page.narrow(1, 0, used));
    else parts.push_back(page.narrow(2, 0, used).transpose(1, 2).flatten(2));
  }
  const auto found = parts.size() == 1 ? parts[0] : at::concat(parts, 1);
  cost::partial_access(cache, found);
  return found;
}

int64_t entry(const Opt<Ints>& lengths, int64_t request, int64_t otherwise) {
  if (!lengths || lengths->empty()) return otherwise;
  return lengths->size() == 1 ? lengths->front() : lengths->at(request);
}

}  // namespace emu::attention
