// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Random numbers. They differ from an NPU's for the same seed, whose generator is not public, and
// are reproducible for the same (seed, offset). In graphs both are read from tensors at replay,
// plus the call's own offset.
#include <ATen/CPUGeneratorImpl.h>

#include "ops/upcast.h"

namespace {

at::Generator generator(int64_t seed, int64_t offset) {
  // splitmix64's constant keeps neighbouring offsets apart.
  return at::detail::createCPUGenerator(
      static_cast<uint64_t>(seed) + static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15ull);
}

// The state of a generator in a captured graph.
struct GraphState {
  at::Tensor seed, offset;
  int64_t within;
  FIELDS(seed, offset, within)
  at::Generator generator() const {
    return ::generator(seed.item<int64_t>(), offset.item<int64_t>() + within);
  }
};

}  // namespace

OP(aclnnInplaceUniform, (Tensor self, double from, double to, int64_t seed, int64_t offset),
    { self.uniform_(from, to, generator(seed, offset)); })
OP(aclnnInplaceUniformTensor, (Tensor self, double from, double to, GraphState state),
    { self.uniform_(from, to, state.generator()); })
OP(aclnnInplaceNormalTensor, (Tensor self, float mean, float std, GraphState state),
    { self.normal_(mean, std, state.generator()); })
OP(aclnnInplaceRandomTensor, (Tensor self, int64_t from, int64_t to, GraphState state),
    { self.random_(from, to, state.generator()); })
OP(aclnnMultinomialTensor,
    (Tensor self, int64_t samples, bool replacement, GraphState state, Tensor out),
    { at::multinomial_out(out, self, samples, replacement, state.generator()); })
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
OP(aclnnInplaceRandom, (Tensor self, int64_t from, int64_t to, int64_t seed, int64_t offset),
    { self.random_(from, to, generator(seed, offset)); })
// All values that the dtype represents exactly, from 0 (torch.Tensor.random_).
OP(aclnnInplaceRandomWithoutFromTo, (Tensor self, int64_t seed, int64_t offset),
    { self.random_(generator(seed, offset)); })
OP(aclnnInplaceRandomWithoutFromToTensor, (Tensor self, GraphState state),
    { self.random_(state.generator()); })
OP(aclnnInplaceBernoulli, (Tensor self, Scalar p, int64_t seed, int64_t offset),
    { self.bernoulli_(p.toDouble(), generator(seed, offset)); })
OP(aclnnInplaceBernoulliTensor, (Tensor self, Tensor p, int64_t seed, int64_t offset),
    { self.bernoulli_(p, generator(seed, offset)); })
OP(aclnnMultinomial,
    (Tensor self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor out),
    { at::multinomial_out(out, self, samples, replacement, generator(seed, offset)); })
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
