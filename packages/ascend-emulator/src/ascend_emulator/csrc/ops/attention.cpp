// Attention and the paged KV cache. Semantics and limits: torch_npu's documentation of npu_fused_infer_attention_score and
// npu_scatter_pa_kv_cache (torch_npu/_op_plugin_docs.py, BSD); argument order: op-plugin's call sites.
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../core/op.h"

namespace {

using at::Tensor;
using emu::check;
using emu::Ints;
using emu::kOpParam;
using emu::Opt;

constexpr int64_t kMaskSide = 2048;  // the compressed mask of sparse modes 2, 3 and 4

struct Sparse {
  int64_t mode, before, after;
  Tensor mask;  // true where a score is left out; undefined if none
};

// Which scores of a request are left out: additive mask of shape [query_len, kv_len], or undefined if all count.
Tensor additive_mask(const Sparse& sparse, int64_t request, int64_t query_len, int64_t kv_len) {
  Tensor left_out;
  const auto difference = [&] {  // (kv position) - (query position)
    return at::arange(kv_len).unsqueeze(0) - at::arange(query_len).unsqueeze(1);
  };
  switch (sparse.mode) {
    case 0:
    case 1:
      if (!sparse.mask.defined()) return {};
      left_out = sparse.mask;
      while (left_out.dim() > 2) left_out = left_out.select(0, left_out.size(0) == 1 || left_out.dim() == 3 ? 0 : request);
      check(left_out.size(0) >= query_len && left_out.size(1) >= kv_len, kOpParam, "the mask ", sparse.mask.sizes(), " is smaller than ",
            query_len, " x ", kv_len);
      left_out = left_out.narrow(0, 0, query_len).narrow(1, 0, kv_len).to(at::kBool);
      break;
    case 2: left_out = difference() > 0; break;
    case 3:
      if (query_len == 1) return {};
      left_out = difference() > kv_len - query_len;
      break;
    case 4: {
      const auto d = difference() - (kv_len - query_len);
      left_out = at::logical_or(d > sparse.after, d < -sparse.before);
      break;
    }
    default: throw emu::Error(kOpParam, emu::text("sparse_mode ", sparse.mode, "; 0, 1, 2, 3 and 4 are there"));
  }
  return at::zeros({query_len, kv_len}, at::kFloat).masked_fill_(left_out, -std::numeric_limits<float>::infinity());
}

// One request: query [N, q, D], key and value [KV_N, s, D]; returns [N, q, D] and the log-sum-exp [N, q].
std::pair<Tensor, Tensor> attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale) {
  const int64_t heads = query.size(0), tokens = query.size(1), groups = key.size(0), share = heads / groups;
  auto q = query.unsqueeze(0), k = key.unsqueeze(0), v = value.unsqueeze(0);
  if (tokens == 1 && !mask.defined()) {
    q = query.reshape({1, groups, share, query.size(2)});  // the heads of a group read the same keys
  } else if (share > 1) {
    const auto spread = [&](const Tensor& x) { return x.unsqueeze(2).expand({1, groups, share, x.size(2), x.size(3)}).reshape({1, heads, x.size(2), x.size(3)}); };
    k = spread(k);
    v = spread(v);
  }
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, mask.defined() ? Opt<Tensor>(mask) : std::nullopt, scale);
  return {out.reshape({heads, tokens, value.size(2)}), lse.reshape({heads, tokens})};
}

// The first `length` tokens of a request's pages as [KV_N, length, D]. A page is [block_size, H] or [KV_N, block_size, D].
Tensor gather_pages(const Tensor& cache, const int32_t* table, int64_t length, int64_t groups, int64_t block_size) {
  const int64_t pages = (length + block_size - 1) / block_size;
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < pages; ++i) {
    check(table[i] >= 0 && table[i] < cache.size(0), kOpParam, "block_table names block ", table[i], " of ", cache.size(0));
    const auto page = cache[table[i]];
    const int64_t used = std::min(block_size, length - i * block_size);
    parts.push_back(page.dim() == 2 ? page.narrow(0, 0, used).unflatten(1, {groups, -1}).transpose(0, 1) : page.narrow(1, 0, used));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

int64_t length_of(const Opt<Ints>& lengths, int64_t request, int64_t otherwise) {
  if (!lengths) return otherwise;
  return lengths->size() == 1 ? lengths->front() : lengths->at(request);
}

struct Fused {
  Tensor query, key, value;
  Sparse sparse;
  Opt<Ints> query_lengths, kv_lengths;
  Tensor table;  // [batch, pages] int32, or undefined
  int64_t heads, groups, block_size;
  double scale;
  std::string layout;

  bool paged() const { return table.defined(); }

  void check_arguments() const {
    for (const auto* x : {&query, &key, &value})
      check(x->scalar_type() == at::kHalf || x->scalar_type() == at::kBFloat16, kOpParam, "dtype ", x->scalar_type(),
            "; float16 and bfloat16 are there");
    check(query.scalar_type() == key.scalar_type() && key.scalar_type() == value.scalar_type(), kOpParam, "query, key and value differ in dtype");
    check(query.is_contiguous() && key.is_contiguous() && value.is_contiguous(), kOpParam, "query, key and value must be contiguous");
    check(heads % groups == 0 && heads / groups <= 64, kOpParam, heads, " heads over ", groups, " key-value heads; a multiple of at most 64 is allowed");
    if (sparse.mode >= 2) {
      check(sparse.mask.defined(), kOpParam, "sparse_mode ", sparse.mode, " needs atten_mask");
      check(sparse.mask.size(-1) == kMaskSide && sparse.mask.size(-2) == kMaskSide, kOpParam, "sparse_mode ", sparse.mode, " needs a mask of 2048 x 2048, not ", sparse.mask.sizes());
    }
    if (sparse.mask.defined())
      check(sparse.mask.scalar_type() == at::kBool || sparse.mask.scalar_type() == at::kChar || sparse.mask.scalar_type() == at::kByte, kOpParam,
            "atten_mask is ", sparse.mask.scalar_type(), "; bool, int8 and uint8 are allowed");
    if (paged()) {
      check(table.dim() == 2 && table.scalar_type() == at::kInt && table.is_contiguous(), kOpParam, "block_table must be a contiguous int32 matrix");
      check(kv_lengths.has_value(), kOpParam, "a paged cache needs actual_seq_lengths_kv");
      check(block_size >= 16 && block_size <= 512 && block_size % 16 == 0, kOpParam, "block_size ", block_size, "; multiples of 16 up to 512 are allowed");
      check(key.dim() == 3 || (key.dim() == 4 && (layout == "TND" || layout == "BNSD")), kOpParam,
            "a paged cache is [blocks, block_size, H], or [blocks, KV_N, block_size, D] for TND and BNSD; found ", key.sizes());
      check(key.size(key.dim() == 3 ? 1 : 2) == block_size, kOpParam, "blocks of ", key.size(key.dim() == 3 ? 1 : 2), " tokens where block_size is ", block_size);
      check(key.numel() <= std::numeric_limits<int32_t>::max(), kOpParam, "the key cache has more than 2^31 - 1 elements, which the kernel cannot address");
    }
  }

  // Key or value of one request as [KV_N, length, D].
  Tensor rows(const Tensor& cache, int64_t request, int64_t length, int64_t start) const {
    if (paged()) return gather_pages(cache, table.const_data_ptr<int32_t>() + request * table.size(1), length, groups, block_size);
    if (layout == "TND") return cache.narrow(0, start, length).transpose(0, 1);
    if (layout == "BNSD") return cache[request].narrow(1, 0, length);
    return cache[request].narrow(0, 0, length).reshape({length, groups, -1}).transpose(0, 1);  // BSH, BSND
  }

  void run_tnd(Tensor& out, const Tensor& lse) const {
    check(query_lengths.has_value() && kv_lengths.has_value(), kOpParam, "TND needs actual_seq_lengths and actual_seq_lengths_kv");
    const auto batch = static_cast<int64_t>(query_lengths->size());
    check(static_cast<int64_t>(kv_lengths->size()) >= batch, kOpParam, "actual_seq_lengths_kv has ", kv_lengths->size(), " entries for ", batch, " requests");
    check(batch == 0 || query_lengths->back() == query.size(0), kOpParam, "actual_seq_lengths ends at ", batch ? query_lengths->back() : 0,
          ", query has ", query.size(0), " tokens");
    if (paged()) check(table.size(0) == batch, kOpParam, "block_table has ", table.size(0), " rows for ", batch, " requests");
    // Where each request begins: queries are cumulative; keys too without pages, each request's own length with them.
    const auto start = [&](int64_t i) { return i ? query_lengths->at(i - 1) : 0; };
    const auto kv_start = [&](int64_t i) { return i && !paged() ? kv_lengths->at(i - 1) : 0; };
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t length = kv_lengths->at(i) - kv_start(i);
      check(query_lengths->at(i) >= start(i) && length >= 0, kOpParam, "sequence lengths of request ", i, " decrease");
      if (paged())
        check(length <= table.size(1) * block_size, kOpParam, "request ", i, " has ", length, " tokens, its row of block_table ", table.size(1),
              " blocks");
    }
    // Requests side by side rather than each on all cores: one of a batch is small.
    at::parallel_for(0, batch, 1, [&](int64_t first, int64_t last) {
      at::AutoDispatchBelowADInplaceOrView kernels_only;
      for (int64_t i = first; i < last; ++i) {
        const int64_t tokens = query_lengths->at(i) - start(i), length = kv_lengths->at(i) - kv_start(i);
        if (tokens == 0) continue;
        auto target = out.narrow(0, start(i), tokens);
        if (length == 0) {
          target.zero_();
          continue;
        }
        const auto [result, sums] = attend(query.narrow(0, start(i), tokens).transpose(0, 1), rows(key, i, length, kv_start(i)),
                                           rows(value, i, length, kv_start(i)), additive_mask(sparse, i, tokens, length), scale);
        target.copy_(result.transpose(0, 1));
        if (lse.defined()) lse.narrow(0, start(i), tokens).copy_(sums.transpose(0, 1).unsqueeze(-1));
      }
    });
  }

  void run_batch(Tensor& out, const Tensor& lse) const {
    const bool heads_first = layout == "BNSD" || layout == "BNSD_BSND", out_heads_first = layout == "BNSD";
    const int64_t batch = query.size(0);
    for (int64_t i = 0; i < batch; ++i) {
      const auto all = heads_first ? query[i] : query[i].reshape({query.size(1), heads, -1}).transpose(0, 1);
      const int64_t tokens = all.size(1) == 1 ? 1 : length_of(query_lengths, i, all.size(1));
      const int64_t length = length_of(kv_lengths, i, heads_first ? key.size(-2) : key.size(1));
      auto target = out_heads_first ? out[i] : out[i].view({out.size(1), heads, -1}).transpose(0, 1);
      target.zero_();
      if (tokens == 0 || length == 0) continue;
      auto own = *this;
      own.layout = heads_first ? "BNSD" : "BSND";
      const auto [result, sums] = attend(all.narrow(1, 0, tokens), own.rows(key, i, length, 0), own.rows(value, i, length, 0),
                                         additive_mask(sparse, i, tokens, length), scale);
      target.narrow(1, 0, tokens).copy_(result);
      if (lse.defined()) lse[i].narrow(1, 0, tokens).copy_(sums.unsqueeze(-1));
    }
  }

  void run(Tensor out, Tensor lse) const {
    check_arguments();
    if (layout == "TND") return run_tnd(out, lse);
    check(layout == "BSH" || layout == "BSND" || layout == "BNSD" || layout == "BNSD_BSND", kOpParam, "input_layout ", layout,
          "; TND, BSH, BSND, BNSD and BNSD_BSND are there");
    run_batch(out, lse);
  }
};

template <class... Absent>
void refuse_given(const char* what, const Absent&... tensors) {
  check((... && !tensors.has_value()), kOpParam, what, " is not emulated");
}

}  // namespace

OP(aclnnFusedInferAttentionScoreV3,
   (Tensor query, Tensors key, Tensors value, Opt<Tensor> pse, Opt<Tensor> mask, Opt<Ints> query_lengths, Opt<Ints> kv_lengths,
    Opt<Tensor> dequant1, Opt<Tensor> quant1, Opt<Tensor> dequant2, Opt<Tensor> quant2, Opt<Tensor> offset2, Opt<Tensor> antiquant_scale,
    Opt<Tensor> antiquant_offset, Opt<Tensor> table, Opt<Tensor> query_padding, Opt<Tensor> kv_padding, Opt<Tensor> key_scale,
    Opt<Tensor> key_offset, Opt<Tensor> value_scale, Opt<Tensor> value_offset, Opt<Tensor> key_prefix, Opt<Tensor> value_prefix,
    Opt<Ints>, Opt<Tensor> query_rope, Opt<Tensor> key_rope, Opt<Tensor> key_rope_scale, int64_t heads, double scale, int64_t before,
    int64_t after, Text layout, int64_t groups, int64_t sparse_mode, int64_t, int64_t block_size, int64_t, bool want_lse, int64_t, int64_t,
    Tensor out, Opt<Tensor> lse),
   {
     refuse_given("pse_shift", pse);
     refuse_given("quantization", dequant1, quant1, dequant2, quant2, offset2, antiquant_scale, antiquant_offset, key_scale, key_offset,
                  value_scale, value_offset);
     refuse_given("left padding", query_padding, kv_padding);
     refuse_given("a shared prefix", key_prefix, value_prefix);
     refuse_given("a separate rope part (MLA)", query_rope, key_rope, key_rope_scale);
     check(key.size() == 1 && value.size() == 1, kOpParam, "lists of ", key.size(), " keys; one tensor is emulated");
     Fused{query, key[0], value[0], {sparse_mode, before, after, mask.value_or(Tensor())}, query_lengths, kv_lengths,
           table.value_or(Tensor()), heads, groups ? groups : heads, block_size, scale, layout}
         .run(out, want_lse ? lse.value_or(Tensor()) : Tensor());
   })

// Plain [blocks, block_size, heads, head_size] pages only (cache_mode "Norm"); slot = block * block_size + place.
OP(aclnnScatterPaKvCache,
   (Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, Opt<Tensor> compress_lens, Opt<Tensor> compress_offsets,
    Opt<Tensor> seq_lens, Text cache_mode, Text, Opt<Ints>, Opt<Ints>),
   {
     refuse_given("a compressed cache", compress_lens, compress_offsets, seq_lens);
     check(cache_mode.empty() || cache_mode == "Norm", kOpParam, "cache_mode ", cache_mode, "; Norm is emulated");
     check(key.dim() == 3 && key_cache.dim() == 4 && slots.dim() == 1, kOpParam, "key ", key.sizes(), ", cache ", key_cache.sizes(), ", slots ", slots.sizes(),
           "; [tokens, heads, size], [blocks, block_size, heads, size] and [tokens] are emulated");
     check(key.size(0) == slots.size(0), kOpParam, key.size(0), " tokens, ", slots.size(0), " slots");
     check(key.scalar_type() == key_cache.scalar_type() && value.scalar_type() == value_cache.scalar_type(), kOpParam, "the cache and what is written differ in dtype");
     const auto where = slots.to(at::kLong).contiguous();
     const int64_t limit = key_cache.size(0) * key_cache.size(1);
     const auto* slot = where.const_data_ptr<int64_t>();
     for (int64_t i = 0; i < where.numel(); ++i) check(slot[i] >= 0 && slot[i] < limit, kOpParam, "slot ", slot[i], " is outside the cache of ", limit);
     const auto put = [&](Tensor& cache, const Tensor& rows) { cache.view({limit, cache.size(2), cache.size(3)}).index_copy_(0, where, rows); };
     put(key_cache, key);
     put(value_cache, value);
   })

// What torch.nn.functional.scaled_dot_product_attention becomes on an NPU: no cache, the whole batch at once. Inputs may be float32.
OP(aclnnFlashAttentionScore,
   (Tensor query, Tensor key, Tensor value, Opt<Tensor> pse, Opt<Tensor> drop_mask, Opt<Tensor>, Opt<Tensor> mask, Opt<Ints> prefix, double scale,
    double keep, int64_t before, int64_t after, int64_t heads, Text layout, int64_t, int64_t sparse_mode, Opt<Tensor> softmax_max,
    Opt<Tensor> softmax_sum, Opt<Tensor>, Tensor out),
   {
     refuse_given("pse", pse);
     check(!drop_mask || drop_mask->numel() == 0 || keep == 1.0, kOpParam, "dropout is not emulated");
     check(!prefix || prefix->empty(), kOpParam, "a prefix is not emulated");
     const bool heads_first = layout == "BNSD";
     check(heads_first || layout == "BSND" || layout == "BSH", kOpParam, "input_layout ", layout, "; BNSD, BSND and BSH are emulated");
     const Sparse sparse{sparse_mode, before, after, mask.value_or(Tensor())};
     for (int64_t i = 0; i < query.size(0); ++i) {
       const auto rows = [&](const Tensor& x, int64_t n) { return heads_first ? x[i] : x[i].reshape({x.size(1), n, -1}).transpose(0, 1); };
       const auto q = rows(query, heads);
       const int64_t groups = heads_first ? key.size(1) : key[i].numel() / key.size(1) / q.size(2);
       const auto k = rows(key, groups), v = rows(value, groups);
       const auto [result, sums] = attend(q, k, v, additive_mask(sparse, i, q.size(1), k.size(1)), scale);
       (heads_first ? out[i] : out[i].view({out.size(1), heads, -1}).transpose(0, 1)).copy_(result);
       // Kept for the backward pass as eight equal columns: maximum and sum, of which only their combination is determined.
       if (softmax_max && softmax_sum && softmax_max->dim() == 4) {
         (*softmax_max)[i].copy_(sums.unsqueeze(-1).expand_as((*softmax_max)[i]));
         (*softmax_sum)[i].fill_(1);
       }
     }
   })
