// The rest of ATB's operators that torch_npu asks for. Rules: torch_npu's documentation of npu_fused_add_topk_div
// (torch_npu/op_plugin/atb/_atb_api_docs.py) and the golden functions of op-plugin's test_atb_rope.py, test_atb_quant_per_tensor.py,
// test__npu_quant_rms_norm.py, test_atb_group_topk.py and test_atb_linear.py.
#include "ops/transformer/kv_rms_norm_rope_cache.h"
#include "ops/transformer/rotary_embedding.h"
#include "atb.h"

namespace atb::infer {

struct RopeParam {
  int32_t coefficient;
};
struct ElewiseParam {
  int32_t type;
};
struct RmsNormParam {
  int32_t layer_type, not_used;
  int32_t quant_type;
  float epsilon;
};
struct GroupTopkParam {
  int32_t groups, kept;
  uint16_t by_sum, summed;
};
struct LinearParam {
  bool transpose_left, transpose_right, has_bias;
  int32_t out_type;
  bool accumulates;
};

}  // namespace atb::infer

namespace {

using namespace emu;
using namespace emu::transformer;

// Values of [-128, 127].
void store_bytes(const Tensor& values, Tensor out) { out.copy_(values.round().clamp_(-128, 127).view(out.sizes())); }

// query and key [tokens, heads * D] in any number of dimensions, cos and sin [tokens, D]; a coefficient of 2 turns halves, one of D neighbours.
Prepare rope(const atb::infer::RopeParam& p) {
  return [p](const Arguments& in, const Arguments& out) -> std::function<void()> {
    const auto cos = in[2].value, sin = in[3].value;
    rank("cos", cos, 2);
    shape("sin", sin, cos.sizes());
    const int64_t size = cos.size(1);
    check(p.coefficient == 2 || p.coefficient == size, kOpParam, "the rotary coefficient is ", p.coefficient, "; 2, or the ", size, " of the cos/sin cache's rows are there");
    multiple("rotary_dim", size, 2);
    for (size_t i : {0, 1}) {
      const auto& x = in[i].value;
      const char* name = i ? "key" : "query";
      one_of(name, x, kFloating);
      check(x.dim() >= 2 && x.size(0) == cos.size(0) && x.numel() % (cos.size(0) * size) == 0 && x.size(-1) % size == 0, kOpParam, name, " has shape ", x.sizes(), " and cos ", cos.sizes(),
            "; it must have as many tokens, and a multiple of rotary_dim");
      shape("the output", out.at(i).value, x.sizes());
    }
    COMPUTE {
      for (size_t i : {0, 1}) {
        const auto rows = in[i].value.view({cos.size(0), -1, size});
        out[i].value.copy_(rotate(rows, cos.unsqueeze(1), sin.unsqueeze(1), p.coefficient != 2).view(in[i].value.sizes()));
      }
    };
  };
}

constexpr int32_t kQuantPerChannel = 17;

Prepare elementwise(const atb::infer::ElewiseParam& p) {
  return [p](const Arguments& in, const Arguments& out) -> std::function<void()> {
    one_of<int32_t>("the elementwise operation (17 quantizes)", p.type, {kQuantPerChannel});
    const auto x = in[0].value, scale = in[1].value, offset = in[2].value, y = out.at(0).value;
    one_of("x", x, kHalves);
    same_dtype("scale", scale, "x", x);
    one_of("y", y, {at::kChar});
    shape("y", y, x.sizes());
    check(at::is_expandable_to(scale.sizes(), x.sizes()), kOpParam, "scale has shape ", scale.sizes(), ", which does not spread to x's ", x.sizes());
    const bool shifts = offset.defined() && offset.numel() > 0;
    if (shifts) {
      one_of("zero_point", offset, {at::kChar});
      check(at::is_expandable_to(offset.sizes(), x.sizes()), kOpParam, "zero_point has shape ", offset.sizes(), ", which does not spread to x's ", x.sizes());
    }
    COMPUTE {
      const auto values = (x.to(at::kFloat) / scale.to(at::kFloat)).round_();
      store_bytes(shifts ? values + offset.to(at::kFloat) : values, y);
    };
  };
}

Prepare rms_norm(const atb::infer::RmsNormParam& p) {
  return [p](const Arguments& in, const Arguments& out) -> std::function<void()> {
    one_of<int32_t>("the kind of norm", p.layer_type, {1});
    one_of<int32_t>("the kind of quantization (2 int8)", p.quant_type, {2});
    const auto x = in[0].value, gamma = in[1].value, beta = in[2].value, scale = in[3].value, offset = in[4].value, y = out.at(0).value;
    one_of("self", x, kHalves);
    for (const auto& [name, each] : {std::pair{"gamma", &gamma}, std::pair{"beta", &beta}, std::pair{"scale", &scale}}) {
      same_dtype(name, *each, "self", x);
      check(each->numel() == (each == &scale ? 1 : x.size(-1)), kOpParam, name, " has shape ", each->sizes(), " for rows of ", x.size(-1));
    }
    one_of("offset", offset, {at::kChar});
    check(offset.numel() == 1, kOpParam, "offset has shape ", offset.sizes(), "; it must have one value");
    one_of("output", y, {at::kChar});
    shape("output", y, x.sizes());
    COMPUTE {
      const auto wide = rms_normed(x, gamma.reshape(-1), p.epsilon) + beta.reshape(-1).to(at::kFloat);
      store_bytes(wide / scale.reshape(-1).to(at::kFloat) + offset.reshape(-1).to(at::kFloat), y);
    };
  };
}

// The highest k of each row, equal ones in their order.
Tensor highest(const Tensor& scores, int64_t k) { return std::get<1>(at::sort(scores, true, -1, true)).narrow(-1, 0, k); }

// True for the experts of the groups with the highest score: the sum of the group's `summed` largest.
Tensor in_groups(const Tensor& scores, int64_t groups, int64_t kept, int64_t summed) {
  const auto of_group = std::get<0>(scores.unflatten(-1, {groups, -1}).topk(summed, -1)).sum(-1);
  return at::zeros(of_group.sizes(), at::kBool).scatter_(-1, highest(of_group, kept), true).repeat_interleave(scores.size(-1) / groups, -1);
}

void check_groups(const Tensor& x, int64_t groups, int64_t kept, int64_t summed) {
  rank("self", x, 2);
  one_of("self", x, kFloating);
  check(groups > 0 && x.size(1) % groups == 0, kOpParam, "group_num is ", groups, "; ", x.size(1), " experts must divide into that many groups");
  within("the number of groups that are kept", kept, int64_t{1}, groups);
  within("n", summed, int64_t{1}, x.size(1) / groups);
}

// Experts of all but the highest groups become zero, in place.
Prepare group_topk(const atb::infer::GroupTopkParam& p) {
  return [p](const Arguments& in, const Arguments& out) -> std::function<void()> {
    const auto x = in[0].value, y = out.at(0).value;
    one_of<int>("the kind of group score", p.by_sum, {0, 1});
    const int64_t summed = p.by_sum ? p.summed : 1;
    check_groups(x, p.groups, p.kept, summed);
    shape("the output", y, x.sizes());
    COMPUTE { y.copy_(x.masked_fill(in_groups(x.to(at::kFloat), p.groups, p.kept, summed).logical_not(), 0)); };
  };
}

// C += x^T weight, in float32.
Prepare linear(const atb::infer::LinearParam& p) {
  return [p](const Arguments& in, const Arguments& out) -> std::function<void()> {
    check(p.accumulates && !p.has_bias, kOpParam, "only a product that is added to its output is emulated");
    const auto turned = [](const Tensor& x, bool turn) { return turn ? x.t() : x; };
    rank("x", in[0].value, 2);
    rank("weight", in[1].value, 2);
    one_of("x", in[0].value, kHalves);
    same_dtype("weight", in[1].value, "x", in[0].value);
    const auto left = turned(in[0].value, p.transpose_left), right = turned(in[1].value, p.transpose_right), c = in[2].value, y = out.at(0).value;
    check(left.size(1) == right.size(0), kOpParam, "x ", in[0].value.sizes(), " and weight ", in[1].value.sizes(), " do not multiply");
    one_of("C", c, {at::kFloat});
    shape("C", c, {left.size(0), right.size(1)});
    shape("the output", y, c.sizes());
    COMPUTE { y.copy_(at::addmm(c, left.to(at::kFloat), right.to(at::kFloat))); };
  };
}

}  // namespace

ATB_PARAMETERS(Rope, 5, 5, "(query, key, cos, sin, tokens)", { return rope(param); })
ATB_PARAMETERS(Elewise, 3, 3, "(x, scale, zero_point)", { return elementwise(param); })
ATB_PARAMETERS(RmsNorm, 5, 5, "(self, gamma, beta, scale, offset)", { return rms_norm(param); })
ATB_PARAMETERS(GroupTopk, 2, 2, "(self, indices)", { return group_topk(param); })
ATB_PARAMETERS(Linear, 3, 3, "(x, weight, C)", { return linear(param); })

// Experts by sigmoid(x) + add_num, their weights by sigmoid(x). activation_type: 8 sigmoid.
ATB_OPERATOR(AtbFusedAddTopkDiv,
             (Tensor x, Tensor added, Opt<Tensor>, Opt<Tensor>, int64_t groups, int64_t kept, int64_t summed, int64_t k, int activation, bool normalized, float scale, bool mapped, Tensor y,
              Tensor indices), {
  one_of<int>("activation_type (8 sigmoid)", activation, {8});
  check(!mapped, kOpParam, "enable_expert_mapping is not emulated: documentation calls its choice pseudo-random");
  check_groups(x, groups, kept, summed);
  shape("add_num", added, {x.size(1)});
  same_dtype("add_num", added, "x", x);
  within("k", k, int64_t{1}, x.size(1) / groups * kept);
  shape("y", y, {x.size(0), k});
  shape("indices", indices, {x.size(0), k});
  COMPUTE {
    const auto gates = at::sigmoid(x.to(at::kFloat)), scores = gates + added.to(at::kFloat);
    const auto left_out = in_groups(scores, groups, kept, summed).logical_not();
    const auto chosen = highest(scores.masked_fill(left_out, -std::numeric_limits<float>::infinity()), k);
    auto weights = gates.gather(-1, chosen);
    if (normalized) weights = weights / weights.sum(-1, true);
    y.copy_(weights * scale);
    indices.copy_(chosen);
  };
})
