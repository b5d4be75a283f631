// What the attention operators share: masks, layouts, pages, and one request's softmax(scale * q k^T + bias) v.
#ifndef ASCEND_EMULATOR_OPS_ATTENTION_ATTENTION_H
#define ASCEND_EMULATOR_OPS_ATTENTION_ATTENTION_H
#include "core/cost.h"
#include "operator/op.h"

namespace emu::attention {

constexpr int64_t kMaskSide = 2048;  // of the compressed mask that stands for the causal and the band modes

// sparse_mode of torch_npu's documentation. The compressed masks hold no information: the mode says what is left out.
struct Sparse {
  int64_t mode = 0, before = INT64_MAX, after = INT64_MAX;
  Tensor mask;                   // true where a score is left out; undefined if none
  Ints prefix = {};              // mode 5 and 6: keys that every query of a request sees
  bool mask_by_request = false;  // a mask of two dimensions is [requests, keys]
};

// [queries, keys] or [heads, queries, keys], true where a score of the request is left out; undefined if all count.
Tensor left_out(const Sparse& sparse, int64_t request, int64_t queries, int64_t keys);

struct Request {
  Tensor query, key, value;     // [heads, queries, D], [groups, keys, D], [groups, keys, DV]
  Tensor left_out, bias, sink;  // each may be undefined; the bias is added to the scaled scores, the sink [heads] to the sum
  double scale;
  Tensor drop = {};     // [heads, queries, keys], what is kept of the probabilities, scaled
  bool causal = false;  // instead of left_out: query i sees keys 0 to i, which costs half

  Tensor mask() const;  // left_out, made if it is not there
};
void leave_out(Request& request, const Sparse& sparse, int64_t index);  // sets left_out or causal
struct Answer {
  Tensor out, lse;   // [heads, queries, DV], in float32 or the query's dtype; [heads, queries] float32
  Tensor most = {};  // attend_wide: the largest score, [heads, queries]; the lowest float32 where no key is seen
};
// A query that sees no key gives zeros and a log-sum-exp of +inf.
Answer attend(const Request& request);
Answer attend_wide(const Request& request);  // in float32 throughout, whatever the dtypes

// Tokens [start, start + count) of a request as [heads, count, D], a view.
Tensor tokens(const Tensor& x, const std::string& layout, int64_t request, int64_t start, int64_t count, int64_t heads);
int64_t batch_of(const Tensor& x, const std::string& layout);
int64_t length_of(const Tensor& x, const std::string& layout);
inline bool packed(const std::string& layout) { return layout == "TND" || layout == "NTD"; }

// The first `length` tokens of a request's pages as [groups, length, D]. A page is [block_size, H], [groups, block_size, D] or,
// in fractal order, [groups, D / c, block_size, c].
Tensor pages(const Tensor& cache, const Tensor& table, int64_t request, int64_t length, int64_t groups, int64_t block_size);

// The entry of a list of lengths that counts for a request: one for all, or one each (documentation of actual_seq_lengths).
int64_t entry(const Opt<Ints>& lengths, int64_t request, int64_t otherwise);

template <class... Absent>
void refuse_given(const char* what, const Absent&... tensors) {
  check((... && (!tensors.has_value() || tensors->numel() == 0)), kOpParam, what, " is not emulated");
}

}  // namespace emu::attention

#endif  // ASCEND_EMULATOR_OPS_ATTENTION_ATTENTION_H
