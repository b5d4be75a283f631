// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's quantization to int8, by channel and behind RMSNorm. Rules: the golden functions of
// op-plugin's test_atb_quant_per_tensor.py and test__npu_quant_rms_norm.py.
#include "ops/transformer/kv_rms_norm_rope_cache.h"
#include "atb.h"

namespace {

using namespace emu;
using namespace emu::transformer;

// Values of [-128, 127].
void store_bytes(const Tensor& values, Tensor out) {
  out.copy_(values.round().clamp_(-128, 127).view(out.sizes()));
}

constexpr int32_t kQuantPerChannel = 17;

}  // namespace

ATB_PARAMETERS(Elewise, 3, 3, "(x, scale, zero_point)", {
  one_of<int32_t>("the elementwise operation (17 quantizes)", p.type, {kQuantPerChannel});
  const auto x = in[0].value, scale = in[1].value, offset = in[2].value, y = out.at(0).value;
  one_of("x", x, kHalves);
  same_dtype("scale", scale, "x", x);
  one_of("y", y, {at::kChar});
  shape("y", y, x.sizes());
  require(at::is_expandable_to(scale.sizes(), x.sizes()), "scale has shape ", scale.sizes(),
      ", which does not broadcast to x's ", x.sizes());
  const bool shifts = offset.defined() && offset.numel() > 0;
  if (shifts) {
    one_of("zero_point", offset, {at::kChar});
    require(at::is_expandable_to(offset.sizes(), x.sizes()), "zero_point has shape ",
        offset.sizes(), ", which does not broadcast to x's ", x.sizes());
  }
  COMPUTE {
    const auto values = (x.to(at::kFloat) / scale.to(at::kFloat)).round_();
    store_bytes(shifts ? values + offset.to(at::kFloat) : values, y);
  };
})
ATB_PARAMETERS(RmsNorm, 5, 5, "(self, gamma, beta, scale, offset)", {
  one_of<int32_t>("layer_type", p.layer_type, {1});
  one_of<int32_t>("quant_type (2 int8)", p.quant_type, {2});
  const auto x = in[0].value, gamma = in[1].value, beta = in[2].value, scale = in[3].value,
             offset = in[4].value, y = out.at(0).value;
  one_of("self", x, kHalves);
  for (const auto& [name, each] :
      {std::pair{"gamma", &gamma}, std::pair{"beta", &beta}, std::pair{"scale", &scale}}) {
    same_dtype(name, *each, "self", x);
    require(each->numel() == (each == &scale ? 1 : x.size(-1)), name, " has shape ", each->sizes(),
        " for rows of ", x.size(-1));
  }
  one_of("offset", offset, {at::kChar});
  require(offset.numel() == 1, "offset has shape ", offset.sizes(), "; it must have one value");
  one_of("output", y, {at::kChar});
  shape("output", y, x.sizes());
  COMPUTE {
    const auto fp32 = rms_normed(x, gamma.reshape(-1), p.epsilon) + beta.reshape(-1).to(at::kFloat);
    store_bytes(fp32 / scale.reshape(-1).to(at::kFloat) + offset.reshape(-1).to(at::kFloat), y);
  };
})
