// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Boxes and regions of interest: npu_iou and npu_roi_align.
#include "ops/upcast.h"

namespace {
using namespace emu;

// Rows of weights [pooled, length]: the mean of bilinear samples at the centres of `samples` parts
// of each bin. Samples more than one value outside count as 0.
Tensor bins(double start, double extent, int64_t pooled, int64_t samples, int64_t length) {
  const double bin = extent / static_cast<double>(pooled);
  const int64_t count = samples > 0 ? samples : static_cast<int64_t>(std::ceil(bin));
  auto weights = at::zeros({pooled, length}, at::kFloat);
  auto* row = weights.mutable_data_ptr<float>();
  for (int64_t part = 0; part < pooled; ++part, row += length) {
    for (int64_t i = 0; i < count; ++i) {
      double at = start + (static_cast<double>(part) +
                              (static_cast<double>(i) + 0.5) / static_cast<double>(count)) *
                              bin;
      if (at < -1 || at > static_cast<double>(length)) continue;
      at = std::clamp(at, 0.0, static_cast<double>(length - 1));
      const auto low = static_cast<int64_t>(at), high = std::min(low + 1, length - 1);
      const auto share = static_cast<float>(at - static_cast<double>(low));
      row[low] += (1 - share) / static_cast<float>(count);
      row[high] += share / static_cast<float>(count);
    }
  }
  return weights;
}

// Regions are rows of index of the image, x0, y0, x1 and y1. With roi_end_mode 1 the last column
// and row count too (op-plugin's test_roi_align.py and test_roi_align_backward.py).
struct Regions {
  Tensor rois;
  double scale;
  int64_t height, width, samples, end_mode;

  void check_arguments(int64_t images) const {
    require(height > 0 && width > 0 && samples >= 0, "pooled_height is ", height, ", pooled_width ",
        width, " and sample_num ", samples);
    require(images > 0, "there is no image");
  }

  template <class Use> void each(const Tensor& images, Use&& use) const {
    const auto regions = rois.to(at::kFloat).contiguous();
    for (int64_t i = 0; i < regions.size(0); ++i) {
      const auto* r = regions.const_data_ptr<float>() + 5 * i;
      const auto image = static_cast<int64_t>(r[0]);
      require(image >= 0 && image < images.size(0), "rois[", i, "] is of image ", image,
          "; there are ", images.size(0));
      const double x = r[1] * scale, y = r[2] * scale, w = (r[3] + end_mode) * scale - x,
                   h = (r[4] + end_mode) * scale - y;
      use(i, image, bins(y, std::max(h, 1.0), height, samples, images.size(2)),
          bins(x, std::max(w, 1.0), width, samples, images.size(3)));
    }
  }
};
}  // namespace

CHECKED(aclnnROIAlign,
    (Tensor self, Tensor rois, float scale, int64_t height, int64_t width, int64_t samples,
        int64_t end_mode, Tensor out),
    {
      const Regions regions{rois, scale, height, width, samples, end_mode};
      regions.check_arguments(self.size(0));
      shape("out", out, {rois.size(0), self.size(1), height, width});
      COMPUTE {
        const auto images = upcast(self);
        regions.each(
            self, [&](int64_t i, int64_t image, const Tensor& rows, const Tensor& columns) {
              out[i].copy_(at::matmul(at::matmul(rows, images[image]), columns.t()));
            });
      };
    })
CHECKED(aclnnROIAlignBackward,
    (Tensor grad, Tensor rois, Ints sizes, int64_t width, int64_t height, float scale,
        int64_t samples, int64_t end_mode, Tensor out),
    {
      require(sizes.size() == 4, "xdiff_shape is ", at::IntArrayRef(sizes),
          "; four numbers are needed");
      shape("out", out, sizes);
      const Regions regions{rois, scale, height, width, samples, end_mode};
      regions.check_arguments(sizes[0]);
      shape("ydiff", grad, {rois.size(0), sizes[1], height, width});
      COMPUTE {
        const auto slopes = upcast(grad), sums = at::zeros(sizes, at::kFloat);
        regions.each(
            sums, [&](int64_t i, int64_t image, const Tensor& rows, const Tensor& columns) {
              sums[image].add_(at::matmul(at::matmul(rows.t(), slopes[i]), columns));
            });
        out.copy_(sums);
      };
    })

// Intersection over union, or over the ground truth's area (iof), of [n, 4] and [m, 4] boxes (x0,
// y0, x1, y1), whose sides are `epsilon` longer (op-plugin's test_iou.py).
CHECKED(
    aclnnIou, (Tensor boxes, Tensor truth, Text mode, float epsilon, bool aligned, Tensor out), {
      require(!aligned, "aligned is true; only false is emulated");
      shape("overlap", out, {boxes.size(0), truth.size(0)});
      COMPUTE {
        const auto ours = upcast(boxes).unsqueeze(1), theirs = upcast(truth).unsqueeze(0);
        const auto side = [&](const Tensor& high, const Tensor& low) {
          return (high - low + epsilon).clamp_min(0);
        };
        const auto part = [](const Tensor& x, int64_t i) { return x.select(-1, i); };
        const auto area = [&](const Tensor& x) {
          return side(part(x, 2), part(x, 0)) * side(part(x, 3), part(x, 1));
        };
        const auto common = side(at::minimum(part(ours, 2), part(theirs, 2)),
                                at::maximum(part(ours, 0), part(theirs, 0))) *
                            side(at::minimum(part(ours, 3), part(theirs, 3)),
                                at::maximum(part(ours, 1), part(theirs, 1)));
        out.copy_(common / (mode == "iof" ? area(theirs) : area(ours) + area(theirs) - common));
      };
    })
