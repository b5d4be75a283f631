// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// ATB's rotary embedding. Rules: the golden function of op-plugin's test_atb_rope.py.
#include "ops/transformer/rotary_embedding.h"
#include "atb.h"

using namespace emu;
using namespace emu::transformer;

// query and key [tokens, heads * D] with any number of dimensions, cos and sin [tokens, D];
// coefficient 2: rotates halves, D: adjacent pairs.
ATB_PARAMETERS(Rope, 5, 5, "(query, key, cos, sin, tokens)", {
  const auto cos = in[2].value, sin = in[3].value;
  rank("cos", cos, 2);
  shape("sin", sin, cos.sizes());
  const int64_t size = cos.size(1);
  require(p.coefficient == 2 || p.coefficient == size, "the rotary coefficient is ", p.coefficient,
      "; 2, or the ", size, " of the cos/sin cache's rows are supported");
  multiple("rotary_dim", size, 2);
  for (size_t i : {0, 1}) {
    const auto& x = in[i].value;
    const char* name = i ? "key" : "query";
    one_of(name, x, kFloating);
    require(x.dim() >= 2 && x.size(0) == cos.size(0) && x.numel() % (cos.size(0) * size) == 0 &&
                x.size(-1) % size == 0,
        name, " has shape ", x.sizes(), " and cos ", cos.sizes(),
        "; it must have as many tokens, and a multiple of rotary_dim");
    shape("the output", out.at(i).value, x.sizes());
  }
  COMPUTE {
    for (size_t i : {0, 1}) {
      const auto rows = in[i].value.view({cos.size(0), -1, size});
      out[i].value.copy_(rotate(rows, cos.unsqueeze(1), sin.unsqueeze(1), p.coefficient != 2)
              .view(in[i].value.sizes()));
    }
  };
})
