// Random numbers. The numbers differ from a real NPU's for the same seed (its generator is not public); they are as random, and
// repeat for the same (seed, offset).
#include <ATen/CPUGeneratorImpl.h>

#include "../core/op.h"

namespace {

at::Generator generator(int64_t seed, int64_t offset) {
  // splitmix64's constant keeps neighbouring offsets apart.
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) + static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15ull);
}

int64_t scalar(const at::Tensor& tensor) { return tensor.reshape(-1)[0].item<int64_t>(); }

}  // namespace

OP(aclnnInplaceUniform, (Tensor self, double from, double to, int64_t seed, int64_t offset), { self.uniform_(from, to, generator(seed, offset)); })
OP(aclnnInplaceUniformTensor, (Tensor self, double from, double to, Tensor seed, Tensor base, int64_t offset), {
  self.uniform_(from, to, generator(scalar(seed), scalar(base) + offset));
})
OP(aclnnInplaceNormal, (Tensor self, float mean, float std, int64_t seed, int64_t offset), { self.normal_(mean, std, generator(seed, offset)); })
OP(aclnnInplaceNormalTensor, (Tensor self, float mean, float std, Tensor seed, Tensor base, int64_t offset), {
  self.normal_(mean, std, generator(scalar(seed), scalar(base) + offset));
})
OP(aclnnInplaceRandom, (Tensor self, int64_t from, int64_t to, int64_t seed, int64_t offset), { self.random_(from, to, generator(seed, offset)); })
OP(aclnnInplaceRandomTensor, (Tensor self, int64_t from, int64_t to, Tensor seed, Tensor base, int64_t offset), {
  self.random_(from, to, generator(scalar(seed), scalar(base) + offset));
})
OP(aclnnInplaceBernoulli, (Tensor self, Scalar p, int64_t seed, int64_t offset), { self.bernoulli_(p.toDouble(), generator(seed, offset)); })
OP(aclnnMultinomial, (Tensor self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor out), {
  at::multinomial_out(out, self, samples, replacement, generator(seed, offset));
})
OP(aclnnMultinomialTensor, (Tensor self, int64_t samples, bool replacement, Tensor seed, Tensor base, int64_t offset, Tensor out), {
  at::multinomial_out(out, self, samples, replacement, generator(scalar(seed), scalar(base) + offset));
})
OP(aclnnRandperm, (int64_t n, int64_t seed, int64_t offset, Tensor out), { at::randperm_out(out, n, generator(seed, offset)); })
