// Operators that move values without computing on them.
#include "../core/op.h"

OP(aclnnInplaceCopy, (Tensor self, Tensor source), { self.copy_(source); })
OP(aclnnCast, (Tensor self, DType, Tensor out), { out.copy_(self); })
OP(aclnnCat, (Tensors tensors, int64_t dim, Tensor out), { at::cat_out(out, tensors, dim); })
OP(aclnnStack, (Tensors tensors, int64_t dim, Tensor out), { at::stack_out(out, tensors, dim); })
OP(aclnnRepeat, (Tensor self, Ints repeats, Tensor out), { out.copy_(self.repeat(repeats)); })
OP(aclnnFlip, (Tensor self, Ints dims, Tensor out), { at::flip_out(out, self, dims); })
OP(aclnnRoll, (Tensor self, Ints shifts, Ints dims, Tensor out), { at::roll_out(out, self, shifts, dims); })
OP(aclnnConstantPadNd, (Tensor self, Ints pad, Scalar value, Tensor out), { at::constant_pad_nd_out(out, self, pad, value); })

OP(aclnnRepeatInterleave, (Tensor self, Tensor repeats, int64_t size, Tensor out), {
  out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size));
})
OP(aclnnRepeatInterleaveWithDim, (Tensor self, Tensor repeats, int64_t dim, int64_t size, Tensor out), {
  out.copy_(at::repeat_interleave(self, repeats, dim, size));
})
OP(aclnnRepeatInterleaveInt, (Tensor self, int64_t repeats, int64_t size, Tensor out), {
  out.copy_(at::repeat_interleave(self, repeats, std::nullopt, size));
})
OP(aclnnRepeatInterleaveIntWithDim, (Tensor self, int64_t repeats, int64_t dim, int64_t size, Tensor out), {
  out.copy_(at::repeat_interleave(self, repeats, dim, size));
})
