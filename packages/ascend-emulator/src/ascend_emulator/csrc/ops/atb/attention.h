// What ATB's attention operators share: requests packed one after the other, or in pages, and what is added to their scores.
#ifndef ASCEND_EMULATOR_OPS_ATB_ATTENTION_H
#define ASCEND_EMULATOR_OPS_ATB_ATTENTION_H
#include "ops/attention/attention.h"
#include "atb.h"

namespace emu::transformer {

// Fractal order, which 310P has for caches and masks of four dimensions, whatever they are declared to be.
inline bool fractal(const Given& given) { return given.format == kFractalNZ || is_chip("Ascend310P"); }
inline at::IntArrayRef given_shape(const Given& given) { return given.value.sizes(); }

struct Masking {
  enum class Kind { none, causal, added, slopes } kind = Kind::none;
  Tensor mask, factors;
  bool by_request = false;  // a mask of three dimensions, or the first of four, is for each request; otherwise for each head
  bool by_token = false;    // its rows are those of all requests' queries, one after the other
  bool ones_hide =
      false;  // where it is positive the score is left out, as the kernels multiply a bfloat16 mask by a number near the least
  bool roots = false;  // of the distances

  // `request` is the one that starts with token `start`.
  void apply(attention::Request& into, int64_t request, int64_t start, int64_t queries, int64_t keys, int64_t heads) const;
};

struct Attention {
  int64_t heads = 0, groups = 0;
  double scale = 1;
  Tensor query, key,
      value;  // [tokens, heads, D] or [tokens, H]; packed like it, or caches; value undefined if it is the key's first numbers
  int64_t latent_values = 0;
  Tensor table;                       // with caches
  Lengths query_lengths, kv_lengths;  // undefined: one query a request; the queries' lengths
  Masking masking;
  Tensor key_scale, value_scale;  // of int8 query, key and value
  Tensor out, lse;                // lse [tokens, heads, 1], undefined if it is not asked for

  // [blocks, block_size, groups, D] or [blocks, block_size, H], or fractal [blocks, H / c, block_size, c], as attention::pages()
  // takes it.
  Tensor cache(const char* name, const Given& given) const;
  Computation prepared();

 private:
  void checked();
  void run() const;
  Tensor quantized(const attention::Request& request) const;
};

}  // namespace emu::transformer

#endif  // ASCEND_EMULATOR_OPS_ATB_ATTENTION_H
