// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's attention: packed requests (PA_ENCODER), and paged caches with several queries
// (PREFIX_ENCODER) or one query (PagedAttention) per request. Rules: torch_npu's documentation of
// _npu_paged_attention_v2, _npu_flash_attention_v2 and _npu_flash_attention_prefix_v2
// (torch_npu/op_plugin/atb/_atb_api_docs.py) and the golden functions of op-plugin's
// test_atb_*attention*.py.
#include "attention.h"

namespace {

using namespace emu;
using namespace emu::transformer;

// A mask in fractal order, [n, columns / 16, rows, 16], as [n, rows, columns].
Tensor mask_of(const AtbTensor& given) {
  require(given.value.defined(), "mask is needed for this mask_type");
  one_of("mask", given.value, kFloating);
  return given.value.dim() == 4 && fractal(given) ? given.value.transpose(1, 2).flatten(2)
                                                  : given.value;
}

Masking added(const AtbTensor& given, bool by_request, bool ones_hide = false) {
  Masking masking{Masking::Kind::added, mask_of(given)};
  masking.by_request = by_request;
  masking.ones_hide = ones_hide && given.value.scalar_type() == at::kBFloat16;
  return masking;
}

Masking slopes(const AtbTensor& mask, const AtbTensor& factors, bool roots, int64_t heads) {
  Masking masking{Masking::Kind::slopes, mask_of(mask), factors.value};
  masking.roots = roots;
  require_emulated(factors.value.defined() && factors.value.numel() == heads,
      "slopes must have one value for each of ", heads,
      " heads; masks of [heads, tokens, 128] without are not emulated");
  one_of("slopes", factors.value, kFloating);
  const auto sizes = masking.mask.sizes().slice(masking.mask.dim() - 2);
  require(sizes[0] == 256 && sizes[1] == 256, "mask has shape ", shape_of(mask),
      "; the compressed ALiBi mask is [256, 256]");
  return masking;
}

enum PagedMask : int32_t { kNone = 0, kAlibi = 2, kSpeculative = 3, kCompressed = 5 };
enum CalcType : int32_t { kPacked = 3, kPrefix = 4 };
enum SelfMask : int32_t {
  kSelfNone = 0,
  kSelfNorm = 1,
  kSelfAlibi = 2,
  kSelfCompressed = 3,
  kSelfAlibiCompressed = 4,
  kSelfAlibiRoots = 5,
  kSelfAlibiLeft = 6
};

}  // namespace

ATB_PARAMETERS(PagedAttention, 4, 7,
    "(query, key_cache, value_cache or block_table, block_table or context_lens, context_lens, "
    "mask or scale, seq_len or scale)",
    {
      one_of<int32_t>("mask_type (0 none, 2 ALiBi, 3 for several queries, 5 compressed)",
          p.mask_type, {kNone, kAlibi, kSpeculative, kCompressed});
      one_of<int32_t>("quant_type (0 none, 3 online)", p.quant_type, {0, 3});
      one_of<int32_t>("calc_type", p.calc_type, {0, 1});
      require_emulated(p.compress_type == 0 && !p.has_quant_offset && !p.batch_run_status,
          "compressed heads, offsets and batch status are not emulated");
      const bool latent = p.latent_values > 0, several = p.calc_type == 1;
      const size_t next = latent ? 2 : 3;
      const auto at = [&](size_t i) {
        require(i < in.size(), in.size(), " input tensors are too few");
        return in[i];
      };
      Attention a(p.heads, p.groups, p.scale);
      a.query = in[0].value;
      a.key = a.cache("key_cache", in[1]);
      a.value = latent ? Tensor() : a.cache("value_cache", in[2]);
      a.latent_values = p.latent_values;
      a.table = at(next).value;
      a.kv_lengths = {at(next + 1).value};
      if (several) a.query_lengths = {at(next + 3).value};
      if (p.mask_type == kAlibi || p.mask_type == kSpeculative)
        a.masking = added(at(next + 2), p.mask_type == kAlibi);
      if (p.mask_type == kSpeculative) a.masking.by_token = true;
      if (p.mask_type == kCompressed) a.masking.kind = Masking::Kind::causal;
      if (p.quant_type == 3) {
        require(p.mask_type == kNone && !latent && !several, "quant_type 3 goes without a mask");
        a.key_scale = at(next + 2).value;
        a.value_scale = at(next + 3).value;
      }
      a.out = out.at(0).value;
      return a.prepared();
    })
ATB_PARAMETERS(SelfAttention, 4, 8,
    "(query, key, value, mask or block_table, seq_len or mask, slopes or seq_len, context_lens, "
    "slopes)",
    {
      one_of<int32_t>(
          "calc_type (3 packed, 4 with a prefix in pages)", p.calc_type, {kPacked, kPrefix});
      require_emulated(
          p.quant_type == 0 && p.clamp_type == 0, "quantization and clamping are not emulated");
      const bool paged = p.calc_type == kPrefix;
      size_t next = 3;
      const auto next_input = [&] {
        require(
            next < in.size(), in.size(), " input tensors are too few for mask_type ", p.mask_type);
        return in[next++];
      };
      Attention a(p.heads, p.groups, p.scale);
      a.query = in[0].value;
      a.key = paged ? a.cache("key_cache", in[1]) : in[1].value;
      a.value = paged ? a.cache("value_cache", in[2]) : in[2].value;
      if (paged) a.table = next_input().value;
      const auto mask = p.mask_type == kSelfNone ? AtbTensor{} : next_input();
      a.query_lengths = {next_input().value};
      if (paged) a.kv_lengths = {next_input().value};
      switch (p.mask_type) {
        case kSelfNone: break;
        case kSelfNorm: a.masking = added(mask, true, true); break;
        case kSelfAlibi:
          a.masking = added(mask, mask.value.defined() && mask.value.dim() == 4 && !fractal(mask));
          break;
        case kSelfCompressed: a.masking.kind = Masking::Kind::causal; break;
        case kSelfAlibiCompressed:
        case kSelfAlibiRoots:
          a.masking = slopes(mask, next_input(), p.mask_type == kSelfAlibiRoots, p.heads);
          break;
        default:
          raise(
              kOpParam, {"mask_type ", p.mask_type, " is not emulated; 0 to 5 are"}, /*own=*/true);
      }
      a.out = out.at(0).value;
      return a.prepared();
    })

// mask_type: 3 compressed causal, 4 and 5 compressed ALiBi, 9 causal without a mask (op-plugin's
// SelfAttentionPrefixEncoderAtb.cpp).
ATB_OPERATOR(AtbSelfAttentionPrefixEncoder,
    (Tensor query, Tensor key, Tensor value, Tensor table, Opt<Tensor> mask, Lengths lengths,
        Lengths kv_lengths, Opt<Tensor> factors, int mask_type, int64_t heads, int64_t groups,
        float scale, Tensor out),
    {
      one_of<int>("mask_type", mask_type, {3, 4, 5, 9});
      Attention a(heads, groups, scale);
      a.query = query;
      a.key = a.cache("key", {key, kND});
      a.value = a.cache("value", {value, kND});
      a.table = table;
      a.query_lengths = lengths;
      a.kv_lengths = kv_lengths;
      a.masking.kind = Masking::Kind::causal;
      if (mask_type == 4 || mask_type == 5)
        a.masking = slopes({mask.value_or(Tensor()), kND}, {factors.value_or(Tensor()), kND},
            mask_type == 5, heads);
      a.out = out;
      return a.prepared();
    })
