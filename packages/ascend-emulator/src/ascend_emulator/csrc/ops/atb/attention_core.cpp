// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "attention.h"

namespace emu::transformer {

using attention::Request;

namespace {

// ALiBi: factor of the head * distance, or its square root; the mask must be the documented one.
Tensor sloped(const Masking& m, int64_t queries, int64_t keys, int64_t heads) {
  const auto distances = [&](int64_t rows, int64_t columns) {
    const auto d = (at::arange(rows, at::kFloat).unsqueeze(1) + (columns - rows) -
                    at::arange(columns, at::kFloat).unsqueeze(0))
                       .clamp_(0);
    return m.roots ? d.sqrt() : d;
  };
  const auto given = m.mask.reshape({-1, 256, 256})[0].to(at::kFloat).tril();
  require(at::allclose(given, distances(256, 256).tril(), 1. / 64, 1. / 64),
      "mask is not the compressed ALiBi mask of documentation, which holds ",
      m.roots ? "the root of the distance" : "the distance", " of query and key");
  return distances(queries, keys).unsqueeze(0) * m.factors.to(at::kFloat).view({heads, 1, 1});
}

}  // namespace

void Masking::apply(Request& into, int64_t request, int64_t start, int64_t queries, int64_t keys,
    int64_t heads) const {
  if (kind == Kind::none) return;
  if (kind != Kind::added) {
    into.masked_out = attention::masked_out({3}, request, queries, keys);
    if (kind == Kind::slopes) into.bias = sloped(*this, queries, keys, heads);
    return;
  }
  auto own = mask;
  if (own.dim() == 4) {
    require(own.size(0) == 1 || request < own.size(0), "mask has shape ", mask.sizes(),
        ", and none for request ", request);
    own = own[own.size(0) == 1 ? 0 : request];
  } else if (own.dim() == 3 && own.size(0) == 1) {
    own = own[0];
  } else if (own.dim() == 3 && by_request && own.size(0) != heads) {
    require(
        request < own.size(0), "mask has shape ", mask.sizes(), ", and none for request ", request);
    own = own[request];
  }
  const int64_t first = by_token ? start : 0;
  require((own.dim() == 2 || own.size(0) == heads || own.size(0) == 1) &&
              own.size(-2) >= first + queries && own.size(-1) >= keys,
      "mask of shape ", mask.sizes(), " is too small for ", queries, " queries from ", first,
      " on x ", keys, " keys of ", heads, " heads");
  own = own.narrow(-2, first, queries).narrow(-1, 0, keys).to(at::kFloat);
  into.bias = ones_hide ? own.masked_fill(own > 0, -std::numeric_limits<float>::infinity()) : own;
}

Tensor Attention::cache(const char* name, const AtbTensor& given) const {
  const auto& x = given.value;
  rank(name, x, 3, 4);
  if (x.dim() == 3) return x;
  const int64_t unit = 32 / x.element_size();
  if (!fractal_cache(name, given)) {
    require(x.size(2) == groups, name, " has shape ", x.sizes(),
        "; it must be [blocks, block_size, ", groups, ", head_size]");
    return x.flatten(2);
  }
  require(x.size(3) == unit && x.size(1) % groups == 0, name, " has shape ", x.sizes(),
      "; in fractal order it must be [blocks, ", groups, " * head_size / ", unit, ", block_size, ",
      unit, "]");
  return x.unflatten(1, {groups, -1});
}

void Attention::checked() {
  const bool paged = table.defined(), small = key_scale.defined();
  require(heads > 0 && groups > 0 && heads % groups == 0, heads, " query heads and ", groups,
      " of keys; the first must be a multiple of the second");
  rank("query", query, 2, 3);
  one_of("query", query, small ? DTypes{at::kChar} : kHalves);
  for (const auto& [name, x] : {std::pair{"key", &key}, std::pair{"value", &value}})
    if (x->defined()) same_dtype(name, *x, "query", query);
  require(query.numel() % (query.size(0) * heads) == 0, "query has shape ", query.sizes(),
      ", which does not divide into ", heads, " heads");
  query = query.view({query.size(0), heads, -1});
  if (paged) {
    rank("block_table", table, 2);
    one_of("block_table", table, {at::kInt});
    table = table.contiguous();
    require(kv_lengths.value.defined() && kv_lengths.value.numel() <= table.size(0),
        "context_lens has ", kv_lengths.value.defined() ? kv_lengths.value.numel() : 0,
        " entries and block_table ", table.size(0), " rows");
  } else {
    for (auto* x : {&key, &value}) {
      rank("key or value", *x, 2, 3);
      require(x->numel() % (x->size(0) * groups) == 0, "key or value has shape ", x->sizes(),
          ", which does not divide into ", groups, " heads");
      *x = x->view({x->size(0), groups, -1});
    }
  }
  for (const auto* lengths : {&query_lengths, &kv_lengths})
    if (lengths->value.defined()) one_of("seq_len or context_lens", lengths->value, kIndices);
  if (small) {
    for (const auto* x : {&key_scale, &value_scale}) {
      one_of("the scale of key or value", *x, {at::kFloat});
      require(x->numel() == heads, "the scale of key or value has shape ", x->sizes(),
          "; it must be [", heads, "]");
    }
  }
  require(query.size(0) > 0 && out.defined() && out.numel() % (query.size(0) * heads) == 0,
      "out has shape ", out.sizes(), " for ", query.size(0), " tokens of ", heads, " heads");
  out = out.view({query.size(0), heads, -1});
}

// int8 scores and probabilities (quant_type 3): a row's largest probability is 127.
Tensor Attention::quantized(const Request& r) const {
  const int64_t share = heads / groups;
  const auto spread = [&](const Tensor& x) { return x.to(at::kFloat).repeat_interleave(share, 0); };
  const auto per_head = [&](const Tensor& x) { return x.to(at::kFloat).view({heads, 1, 1}); };
  const auto scores =
      at::bmm(r.query.to(at::kFloat), spread(r.key).transpose(1, 2)) * per_head(key_scale) * scale;
  const auto weights = (scores - scores.amax(-1, true)).exp();
  return at::bmm((weights * 127).round(), spread(r.value)) * (per_head(value_scale) / 127) /
         weights.sum(-1, true);
}

void Attention::run() const {
  const bool paged = table.defined();
  const int64_t fixed = query.size(0);
  const auto kv = kv_lengths.value.defined() ? kv_lengths() : query_lengths();
  const auto counts = query_lengths.value.defined() ? query_lengths() : Ints(kv.size(), 1);
  require(counts.size() == kv.size(), "seq_len has ", counts.size(), " entries and context_lens ",
      kv.size());
  const int64_t block_size = paged ? (key.dim() == 3 ? key.size(1) : key.size(3)) : 0;
  int64_t start = 0, kv_start = 0;
  for (size_t i = 0; i < kv.size(); ++i) {
    const int64_t queries = counts[i], keys = kv[i];
    require(queries >= 0 && keys >= 0 && start + queries <= fixed, "request ", i, " has ", queries,
        " queries from ", start, " on, of ", fixed, ", and ", keys, " keys");
    const auto part = [&](const Tensor& x) {
      require(!paged || keys <= table.size(1) * block_size, "request ", i, " has ", keys,
          " keys, and block_table pages for ", paged ? table.size(1) * block_size : 0);
      require(paged || kv_start + keys <= x.size(0), "key and value have ", x.size(0),
          " tokens, fewer than the sum of seq_len");
      if (!paged) return x.narrow(0, kv_start, keys).transpose(0, 1);
      return keys ? attention::pages(x, table, static_cast<int64_t>(i), keys, groups, block_size)
                  : at::empty({groups, 0, 1}, x.options());
    };
    const auto target = out.narrow(0, start, queries);
    if (queries && keys == 0) {
      target.zero_();
    } else if (queries) {
      Request request;
      request.query = query.narrow(0, start, queries).transpose(0, 1);
      request.key = part(key);
      request.value = value.defined() ? part(value) : request.key.narrow(2, 0, latent_values);
      request.scale = scale;
      masking.apply(request, static_cast<int64_t>(i), start, queries, keys, heads);
      if (key_scale.defined()) {
        target.copy_(quantized(request).transpose(0, 1));
      } else {
        const auto result = attention::attend(request);
        target.copy_(result.out.transpose(0, 1));
        if (lse.defined())
          Tensor(lse)
              .view({fixed, heads})
              .narrow(0, start, queries)
              .copy_(result.lse.transpose(0, 1));
      }
    }
    start += queries;
    kv_start += keys;
  }
}

Computation Attention::prepared() {
  checked();
  return [self = *this] { self.run(); };
}

}  // namespace emu::transformer
