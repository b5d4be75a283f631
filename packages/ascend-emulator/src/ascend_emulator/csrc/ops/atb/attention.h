// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Common part of ATB's attention operators: packed or paged requests, masks and ALiBi.
#pragma once
#include "ops/attention/attention.h"
#include "atb.h"

namespace emu::transformer {

// Whether a mask is in fractal order; on 310P those of four dimensions always are.
inline bool fractal(const AtbTensor& given) {
  return given.format == kFractalNZ || is_chip("Ascend310P");
}
// Whether a cache is in fractal order. On 310P it has to be, by its format too: torch_npu hands the
// format to ATB (op-plugin's Utils.cpp), and vllm-ascend allocates the caches in FRACTAL_NZ.
inline bool fractal_cache(const char* name, const AtbTensor& given) {
  const bool nz = given.format == kFractalNZ;
  require(nz || !is_chip("Ascend310P"), name,
      " is not in FRACTAL_NZ, as KV caches of this chip are; ",
      "fix: torch_npu.empty_with_format(..., acl_format=29)");
  return nz;
}
inline at::IntArrayRef shape_of(const AtbTensor& given) { return given.value.sizes(); }

struct Masking {
  enum class Kind { none, causal, added, slopes } kind = Kind::none;
  Tensor mask, factors;
  bool by_request = false;  // the leading mask dimension is the request; otherwise the head
  bool by_token = false;    // mask rows are all requests' queries, concatenated
  bool ones_hide = false;   // positive values mask a score: kernels multiply a bfloat16 mask by a
                            // large negative number
  bool roots = false;       // use the square roots of the distances

  // The request starts at token `start`.
  void apply(attention::Request& into, int64_t request, int64_t start, int64_t queries,
      int64_t keys, int64_t heads) const;
};

struct Attention {
  Attention(int64_t heads, int64_t groups, double scale)
      : heads(heads), groups(groups ? groups : heads), scale(scale) {}
  int64_t heads, groups;
  double scale;
  Tensor query, key,
      value;  // [tokens, heads, D] or [tokens, H]; key and value packed likewise, or caches; value
              // undefined: the first latent_values of the key
  int64_t latent_values = 0;
  Tensor table;                       // block table, for caches
  Lengths query_lengths, kv_lengths;  // defaults: one query per request; the query lengths
  Masking masking;
  Tensor key_scale, value_scale;  // of int8 query, key and value
  Tensor out, lse;                // lse [tokens, heads, 1], undefined if not requested

  // [blocks, block_size, groups, D] or [blocks, block_size, H], or fractal [blocks, H / c,
  // block_size, c], as for attention::pages().
  Tensor cache(const char* name, const AtbTensor& given) const;
  Computation prepared();

 private:
  void checked();
  void run() const;
  Tensor quantized(const attention::Request& request) const;
};

}  // namespace emu::transformer
