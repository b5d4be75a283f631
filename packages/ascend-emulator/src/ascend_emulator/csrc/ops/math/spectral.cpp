// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Short-time Fourier transform; torch's other Fourier transforms run without CANN. Rules: CANN's
// API reference, aclStft; argument order: op-plugin's call site (StftKernelNpuOpApi.cpp).
#include "operator/op.h"

// self [L] or [batch, L] to out [..., frequencies, frames], complex, or with a last dimension of 2.
// torch pads for `center`.
OP(aclStft,
    (Tensor self, Opt<Tensor> window, Tensor out, int64_t n_fft, int64_t hop, int64_t win_length,
        bool normalized, bool onesided, bool complex),
    {
      within("n_fft", n_fft, int64_t{1}, self.size(-1));
      within("win_length", win_length, int64_t{1}, n_fft);
      require(!onesided || !self.is_complex(), "onesided is true and self is ", self.scalar_type(),
          "; it must be real");
      if (window) shape("window", *window, {win_length});
      const auto found = at::stft(self, n_fft, hop, win_length, window, normalized, onesided, true);
      const auto values = complex ? found : at::view_as_real(found);
      shape("out", out, values.sizes());
      out.copy_(values);
    })
