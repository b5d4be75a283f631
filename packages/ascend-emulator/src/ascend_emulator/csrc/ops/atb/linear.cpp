// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's matrix product with accumulation. Rules: the golden function of op-plugin's
// test_atb_linear.py.
#include "atb.h"

using namespace emu;
using namespace emu::transformer;

// C += x^T weight, in float32.
ATB_PARAMETERS(Linear, 3, 3, "(x, weight, C)", {
  require(p.accumulates && !p.has_bias, "only a product that is added to its output is emulated");
  const auto turned = [](const Tensor& x, bool turn) { return turn ? x.t() : x; };
  rank("x", in[0].value, 2);
  rank("weight", in[1].value, 2);
  one_of("x", in[0].value, kHalves);
  same_dtype("weight", in[1].value, "x", in[0].value);
  const auto left = turned(in[0].value, p.transpose_left),
             right = turned(in[1].value, p.transpose_right), c = in[2].value, y = out.at(0).value;
  require(left.size(1) == right.size(0), "x ", in[0].value.sizes(), " and weight ",
      in[1].value.sizes(), " do not multiply");
  one_of("C", c, {at::kFloat});
  shape("C", c, {left.size(0), right.size(1)});
  shape("the output", y, c.sizes());
  COMPUTE { y.copy_(at::addmm(c, left.to(at::kFloat), right.to(at::kFloat))); };
})
