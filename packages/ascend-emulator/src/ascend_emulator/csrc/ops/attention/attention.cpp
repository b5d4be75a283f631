#include "attention.h"

#include <ATen/Parallel.h>

namespace emu::attention {
namespace {

constexpr int64_t kMostScores = 1 << 24;  // so that the scores of a long prompt are not in memory at once
constexpr int64_t kCausalRows = 64;       // at a time, each with the keys up to the last of them

Tensor plain_mask(const Tensor& mask, bool by_request, int64_t request, int64_t queries, int64_t keys) {
  auto own = mask;
  if (own.dim() == 4) own = own[own.size(0) == 1 ? 0 : request];                          // [B or 1, 1 or N, queries, keys]
  if (own.dim() == 3 && own.size(0) == 1) own = own[0];                                   // [1, queries, keys]
  if (own.dim() == 2 && by_request && own.size(0) != 1) own = own.narrow(0, request, 1);  // [B, keys]
  check(own.size(-2) >= queries && own.size(-1) >= keys, kOpParam, "atten_mask of shape ", mask.sizes(), " is smaller than ",
      queries, " queries x ", keys, " keys");
  return own.narrow(-2, 0, queries).narrow(-1, 0, keys).to(at::kBool);
}

}  // namespace

Tensor left_out(const Sparse& sparse, int64_t request, int64_t queries, int64_t keys) {
  const auto difference = [&] {
    return at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1);
  };  // key's place - query's
  const auto outside = [&](const Tensor& d) {
    return at::logical_or(d > std::min<int64_t>(sparse.after, INT32_MAX), d < -std::min<int64_t>(sparse.before, INT32_MAX));
  };
  switch (sparse.mode) {
    case 0:
    case 1: {
      if (!sparse.mask.defined()) return {};
      const auto given = plain_mask(sparse.mask, sparse.mask_by_request, request, queries, keys);
      const bool band = sparse.mode == 0 && (sparse.before < queries || sparse.after < keys);
      return band ? at::logical_or(given, outside(difference())) : given;
    }
    case 2: return difference() > 0;
    case 3: return queries == 1 ? Tensor() : difference() > keys - queries;
    case 4: return outside(difference() - (keys - queries));
    case 5:
    case 6: {
      check(static_cast<int64_t>(sparse.prefix.size()) > request, kOpParam, "sparse_mode ", sparse.mode,
          " needs a prefix for each request");
      return at::logical_and(difference() > keys - queries, at::arange(keys).unsqueeze(0) >= sparse.prefix[request]);
    }
  }
  throw Error(kOpParam, text("sparse_mode ", sparse.mode, "; 0 to 6 are there"));
}

void leave_out(Request& r, const Sparse& sparse, int64_t index) {
  // The kernels read of a compressed mask what lies before a request's keys.
  if (sparse.mode >= 2 && sparse.mask.defined())
    cost::touches(sparse.mask, static_cast<double>(r.query.size(1) * std::min(r.key.size(1), kMaskSide) * (r.query.size(1) > 1)));
  r.causal = sparse.mode == 2 || (sparse.mode == 3 && r.query.size(1) == r.key.size(1));
  if (!r.causal) r.left_out = left_out(sparse, index, r.query.size(1), r.key.size(1));
}

Tensor Request::mask() const { return causal ? attention::left_out({2}, 0, query.size(1), key.size(1)) : left_out; }

// Of query k^T and the weighed sum of values, for the pairs that count.
void tell_operations(const Request& r) {
  const auto queries = static_cast<double>(r.query.size(1)), keys = static_cast<double>(r.key.size(1)),
             both = std::min(queries, keys);
  const double pairs = r.causal ? both * (both + 1) / 2 + (queries - both) * keys : queries * keys;
  cost::operates(2 * static_cast<double>(r.query.size(0)) * pairs * static_cast<double>(r.key.size(2) + r.value.size(2)),
      static_cast<int>(r.query.element_size()));
}

// For what has a bias, a sink, or values of another size than keys.
Answer attend_wide(const Request& r) {
  tell_operations(r);
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLowest = std::numeric_limits<float>::lowest();
  const int64_t heads = r.query.size(0), queries = r.query.size(1), groups = r.key.size(0), share = heads / groups,
                keys = r.key.size(1);
  const auto key = r.key.to(at::kFloat).transpose(1, 2).contiguous(), value = r.value.to(at::kFloat).contiguous();
  Answer answer{at::empty({heads, queries, value.size(2)}, key.options()), at::empty({heads, queries}, key.options()),
      at::empty({heads, queries}, key.options())};
  const int64_t step =
      std::min(r.causal ? kCausalRows : INT64_MAX, std::max<int64_t>(1, kMostScores / std::max<int64_t>(1, heads * keys)));
  for (int64_t first = 0; first < queries; first += step) {
    const int64_t count = std::min(step, queries - first);
    const int64_t seen = r.causal ? std::min(keys, first + count) : keys;
    const auto rows = [&](const Tensor& x) { return x.narrow(-2, first, count); };
    const auto part = [&](const Tensor& x) { return (x.size(-2) == 1 ? x : rows(x)).narrow(-1, 0, seen); };
    auto scores = at::bmm(rows(r.query).to(at::kFloat).reshape({groups, share * count, r.query.size(2)}), key.narrow(2, 0, seen))
                      .mul_(r.scale)
                      .view({heads, count, seen});
    if (r.bias.defined()) scores.add_(part(r.bias));
    if (r.causal && seen > first)
      scores.narrow(2, first, seen - first).masked_fill_(left_out({2}, 0, count, seen - first), -kInfinity);
    if (r.left_out.defined()) scores.masked_fill_(part(r.left_out), -kInfinity);
    auto most = scores.amax(-1, true);
    if (r.sink.defined()) most = at::maximum(most, r.sink.to(at::kFloat).view({heads, 1, 1}));
    most.clamp_(kLowest);
    auto weights = scores.sub_(most).exp_();
    auto sum = weights.sum(-1, true);
    if (r.sink.defined()) sum.add_(r.sink.to(at::kFloat).view({heads, 1, 1}).sub(most).exp_());
    if (r.drop.defined()) weights.mul_(part(r.drop));
    const auto out =
        at::bmm(weights.view({groups, share * count, seen}), value.narrow(1, 0, seen)).view({heads, count, value.size(2)});
    const auto blind = sum == 0;
    answer.out.narrow(1, first, count).copy_(out.div_(sum.masked_fill(blind, 1)));
    answer.lse.narrow(1, first, count).copy_(sum.log().add_(most).masked_fill_(blind, kInfinity).squeeze(-1));
    answer.most.narrow(1, first, count).copy_(most.squeeze(-1));
  }
  return answer;
}

Answer attend(const Request& r) {
  const int64_t heads = r.query.size(0), queries = r.query.size(1), groups = r.key.size(0), share = heads / groups;
  if (queries == 0 || r.key.size(1) == 0)
    return {at::zeros({heads, queries, r.value.size(2)}, at::kFloat),
        at::full({heads, queries}, std::numeric_limits<float>::infinity(), at::kFloat)};
  if (r.bias.defined() || r.sink.defined() || r.drop.defined() || (r.left_out.defined() && r.left_out.dim() == 3) ||
      r.value.size(2) != r.key.size(2) || r.query.scalar_type() != r.key.scalar_type())
    return attend_wide(r);
  tell_operations(r);
  auto q = r.query.unsqueeze(0), k = r.key.unsqueeze(0), v = r.value.unsqueeze(0);
  if (queries == 1 && !r.left_out.defined() && !r.causal) {
    q = r.query.reshape({1, groups, share, r.query.size(2)});  // the heads of a group read the same keys
  } else if (share > 1) {
    const auto spread = [&](const Tensor& x) {
      return x.unsqueeze(2).expand({1, groups, share, x.size(2), x.size(3)}).reshape({1, heads, x.size(2), x.size(3)});
    };
    k = spread(k);
    v = spread(v);
  }
  Opt<Tensor> added;
  Tensor nothing;
  if (r.left_out.defined()) {
    added = at::zeros(r.left_out.sizes(), at::kFloat).masked_fill_(r.left_out, -std::numeric_limits<float>::infinity());
    const auto blind = r.left_out.all(-1);
    if (blind.any().item<bool>()) nothing = blind.unsqueeze(0);
  }
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, r.causal, added, r.scale);
  Answer answer{out.reshape({heads, queries, r.value.size(2)}), lse.reshape({heads, queries})};
  if (nothing.defined()) {
    answer.out.masked_fill_(nothing.unsqueeze(-1), 0);
    answer.lse = answer.lse.masked_fill(nothing, std::numeric_limits<float>::infinity());
  }
  return answer;
}

Tensor tokens(const Tensor& x, const std::string& layout, int64_t request, int64_t start, int64_t count, int64_t heads) {
  if (layout == "TND") return x.narrow(0, start, count).transpose(0, 1);
  if (layout == "NTD" || layout == "NSD") return x.narrow(1, start, count);
  if (layout == "BNSD") return x[request].narrow(1, start, count);
  if (layout == "NBSD") return x.select(1, request).narrow(1, start, count);
  if (layout == "BSND") return x[request].narrow(0, start, count).transpose(0, 1);
  if (layout == "SBH") return x.select(1, request).narrow(0, start, count).unflatten(-1, {heads, -1}).transpose(0, 1);
  check(layout == "BSH", kOpParam, "input_layout ", layout, " is unknown");
  return x[request].narrow(0, start, count).unflatten(-1, {heads, -1}).transpose(0, 1);
}

int64_t batch_of(const Tensor& x, const std::string& layout) {
  return layout == "NSD" ? 1 : x.size(layout == "NBSD" || layout == "SBH" ? 1 : 0);
}

int64_t length_of(const Tensor& x, const std::string& layout) {
  return x.size(layout == "BNSD" || layout == "NBSD" ? 2 : layout == "TND" || layout == "SBH" ? 0 : 1);
}

Tensor pages(const Tensor& cache, const Tensor& table, int64_t request, int64_t length, int64_t groups, int64_t block_size) {
  const auto* row = table.const_data_ptr<int32_t>() + request * table.size(1);
  const int64_t count =
      std::max<int64_t>(1, (length + block_size - 1) / block_size);  // none of the first page, where there is nothing
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < count; ++i) {
    check(row[i] >= 0 && row[i] < cache.size(0), kOpParam, "block_table names block ", row[i], " of ", cache.size(0));
    const auto page = cache[row[i]];
    const int64_t used = std::min(block_size, length - i * block_size);
    if (page.dim() == 2)
      parts.push_back(page.narrow(0, 0, used).unflatten(1, {groups, -1}).transpose(0, 1));
    else if (page.dim() == 3)
      parts.push_back(page.narrow(1, 0, used));
    else
      parts.push_back(page.narrow(2, 0, used).transpose(1, 2).flatten(2));
  }
  const auto found = parts.size() == 1 ? parts[0] : at::cat(parts, 1);
  cost::touches(cache, found);
  return found;
}

int64_t entry(const Opt<Ints>& lengths, int64_t request, int64_t otherwise) {
  if (!lengths || lengths->empty()) return otherwise;
  return lengths->size() == 1 ? lengths->front() : lengths->at(request);
}

}  // namespace emu::attention
