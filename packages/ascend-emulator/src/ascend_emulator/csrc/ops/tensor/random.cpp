// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Operators that draw random numbers.
#include "ops/random.h"
#include "ops/upcast.h"

// Of one call, and in a captured graph.
#define DRAWN(NAME, PARAMETERS, ...)                                 \
  OP(aclnn##NAME, (UNPACK PARAMETERS, CallState state), __VA_ARGS__) \
  OP(aclnn##NAME##Tensor, (UNPACK PARAMETERS, GraphState state), __VA_ARGS__)
#define UNPACK(...) __VA_ARGS__
DRAWN(InplaceUniform, (Tensor self, double from, double to),
    { self.uniform_(from, to, state.generator()); })
DRAWN(InplaceRandom, (Tensor self, int64_t from, int64_t to),
    { self.random_(from, to, state.generator()); })
// All values that the dtype represents exactly, from 0 (torch.Tensor.random_).
DRAWN(InplaceRandomWithoutFromTo, (Tensor self), { self.random_(state.generator()); })
#define MULTINOMIAL(NAME, STATE)                                                      \
  OP(NAME, (Tensor self, int64_t samples, bool replacement, STATE state, Tensor out), \
      { at::multinomial_out(out, self, samples, replacement, state.generator()); })
MULTINOMIAL(aclnnMultinomial, CallState)
MULTINOMIAL(aclnnMultinomialTensor, GraphState)
OP(aclnnInplaceNormalTensor, (Tensor self, float mean, float std, GraphState state),
    { self.normal_(mean, std, state.generator()); })
OP(aclnnInplaceNormal, (Tensor self, float mean, float std, int64_t seed, int64_t offset), {
  if (self.is_floating_point()) self.normal_(mean, std, generator(seed, offset));
  else self.copy_(at::empty(self.sizes(), at::kFloat).normal_(mean, std, generator(seed, offset)));
})
OP(aclnnNormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Tensor out),
    { out.normal_(mean, std, generator(seed, offset)); })
OP(aclnnNormalTensorFloat, (Tensor mean, float std, int64_t seed, int64_t offset, Tensor out),
    { out.normal_(0, std, generator(seed, offset)).add_(mean); })
OP(aclnnNormalFloatTensor, (float mean, Tensor std, int64_t seed, int64_t offset, Tensor out),
    { out.normal_(0, 1, generator(seed, offset)).mul_(std).add_(mean); })
OP(aclnnNormalTensorTensor, (Tensor mean, Tensor std, int64_t seed, int64_t offset, Tensor out),
    { out.normal_(0, 1, generator(seed, offset)).mul_(std).add_(mean); })
OP(aclnnInplaceBernoulli, (Tensor self, Scalar p, int64_t seed, int64_t offset),
    { self.bernoulli_(p.toDouble(), generator(seed, offset)); })
OP(aclnnInplaceBernoulliTensor, (Tensor self, Tensor p, int64_t seed, int64_t offset),
    { self.bernoulli_(p, generator(seed, offset)); })
OP(aclnnRandperm, (int64_t n, int64_t seed, int64_t offset, Tensor out),
    { at::randperm_out(out, n, generator(seed, offset)); })

namespace {
// noise contains the random slopes.
void rrelu(const at::Tensor& self, at::Tensor& noise, const at::Scalar& lower,
    const at::Scalar& upper, bool training, const at::Generator& generator, at::Tensor& out) {
  auto slopes = emu::upcast(noise);
  out.copy_(at::rrelu_with_noise(emu::upcast(self), slopes, lower, upper, training, generator));
  noise.copy_(slopes);
}
}  // namespace
OP(aclnnRReluWithNoise,
    (Tensor self, Tensor noise, Scalar lower, Scalar upper, bool training, int64_t seed,
        int64_t offset, Tensor out),
    { rrelu(self, noise, lower, upper, training, generator(seed, offset), out); })
OP(aclnnInplaceRReluWithNoise,
    (Tensor self, Tensor noise, Scalar lower, Scalar upper, bool training, int64_t seed,
        int64_t offset),
    { rrelu(self, noise, lower, upper, training, generator(seed, offset), self); })
