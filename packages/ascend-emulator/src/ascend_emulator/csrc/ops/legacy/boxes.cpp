// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Legacy graph operators of boxes. Boxes are [4, n], corners or, with `trans`, centers and sizes;
// Iou's and those of BoundingBoxEncode and BoundingBoxDecode are [n, 4], corners. The formulas are
// those of op-plugin's tests: test_npu_giou.py, test_npu_diou.py, test_ciou.py, test_iou.py,
// test_bounding_box_decode.py and test_bounding_box_encode.py.
#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

struct Corners {
  Tensor x1, y1, x2, y2;
};
Corners corners(const Tensor& boxes, bool centered) {
  if (!centered) return {boxes[0], boxes[1], boxes[2], boxes[3]};
  return {boxes[0] - boxes[2] / 2, boxes[1] - boxes[3] / 2, boxes[0] + boxes[2] / 2,
      boxes[1] + boxes[3] / 2};
}

// Two sets of boxes, compared one by one, or each of the second with each of the first.
struct Pair {
  Corners a, b;
  double epsilon;
  Tensor intersection() const {
    return (at::minimum(a.x2, b.x2) - at::maximum(a.x1, b.x1)).clamp_min(0) *
           (at::minimum(a.y2, b.y2) - at::maximum(a.y1, b.y1)).clamp_min(0);
  }
  Tensor width() const {
    return at::maximum(a.x2, b.x2) - at::minimum(a.x1, b.x1);
  }  // of what encloses both
  Tensor height() const { return at::maximum(a.y2, b.y2) - at::minimum(a.y1, b.y1); }
  Tensor overlap(bool foreground) const {
    const auto common = intersection();
    const auto second = (b.x2 - b.x1) * (b.y2 - b.y1 + epsilon);
    const auto divisor =
        foreground ? second : (a.x2 - a.x1) * (a.y2 - a.y1 + epsilon) + second - common;
    return common / (divisor + epsilon);
  }
  // Square of the distance of the centers, relative to the diagonal of what encloses both.
  Tensor distance() const {
    const auto x = b.x1 + b.x2 - a.x1 - a.x2;
    const auto y = b.y1 + b.y2 - a.y1 - a.y2;
    return (x * x + y * y) / 4 / (width().square() + height().square() + epsilon);
  }
};

// Derivatives of min(a, b) and max(a, b) by a: one half where they are the same, as in PyTorch.
Tensor takes_smaller(const Tensor& a, const Tensor& b) {
  return a.lt(b).to(a.scalar_type()) + 0.5 * a.eq(b).to(a.scalar_type());
}

// Derivatives by the corners of both boxes.
struct Slopes {
  Corners a, b;
  explicit Slopes(const Pair& of) : a{zero(of), zero(of), zero(of), zero(of)}, b(a) {}
  // That by the intersection, times `by`.
  void intersection(const Pair& of, const Tensor& by) {
    const auto width = at::minimum(of.a.x2, of.b.x2) - at::maximum(of.a.x1, of.b.x1);
    const auto height = at::minimum(of.a.y2, of.b.y2) - at::maximum(of.a.y1, of.b.y1);
    const auto there = at::logical_and(width.gt(0), height.gt(0));
    inner(of.a.x1, of.b.x1, of.a.x2, of.b.x2, by * height * there, a.x1, b.x1, a.x2, b.x2);
    inner(of.a.y1, of.b.y1, of.a.y2, of.b.y2, by * width * there, a.y1, b.y1, a.y2, b.y2);
  }
  // By width and height of what encloses both.
  void enclosing(const Pair& of, const Tensor& by_width, const Tensor& by_height) {
    inner(of.a.x2, of.b.x2, of.a.x1, of.b.x1, -by_width, a.x2, b.x2, a.x1, b.x1);
    inner(of.a.y2, of.b.y2, of.a.y1, of.b.y1, -by_height, a.y2, b.y2, a.y1, b.y1);
  }
  // By the sum of the areas.
  void areas(const Pair& of, const Tensor& by) {
    for (const auto& [box, slopes] : {std::pair{&of.a, &a}, std::pair{&of.b, &b}}) {
      const auto by_width = by * (box->y2 - box->y1 + of.epsilon);
      const auto by_height = by * (box->x2 - box->x1);
      *slopes = {slopes->x1 - by_width, slopes->y1 - by_height, slopes->x2 + by_width,
          slopes->y2 + by_height};
    }
  }
  // By the differences of the sums of the corners.
  void distance(const Tensor& by_x, const Tensor& by_y) {
    a = {a.x1 - by_x, a.y1 - by_y, a.x2 - by_x, a.y2 - by_y};
    b = {b.x1 + by_x, b.y1 + by_y, b.x2 + by_x, b.y2 + by_y};
  }

 private:
  static Tensor zero(const Pair& of) { return at::zeros_like(of.a.x1); }
  // By min(high, high of the other) - max(low, low of the other).
  static void inner(const Tensor& low, const Tensor& other_low, const Tensor& high,
      const Tensor& other_high, const Tensor& by, Tensor& of_low, Tensor& of_other_low,
      Tensor& of_high, Tensor& of_other_high) {
    of_high = of_high + by * takes_smaller(high, other_high);
    of_other_high = of_other_high + by * takes_smaller(other_high, high);
    of_low = of_low - by * takes_smaller(other_low, low);
    of_other_low = of_other_low - by * takes_smaller(low, other_low);
  }
};

void write(const Corners& slopes, bool is_centered, const Tensor& out) {
  out.copy_(is_centered ? at::stack({slopes.x1 + slopes.x2, slopes.y1 + slopes.y2,
                              (slopes.x2 - slopes.x1) / 2, (slopes.y2 - slopes.y1) / 2})
                        : at::stack({slopes.x1, slopes.y1, slopes.x2, slopes.y2}));
}

struct Request {
  Tensor first, second;
  bool centered, cross, foreground;
  Pair pair(double epsilon) const {
    const auto a = corners(upcast(first), centered);
    auto b = corners(upcast(second), centered);
    if (cross) b = {b.x1.unsqueeze(1), b.y1.unsqueeze(1), b.x2.unsqueeze(1), b.y2.unsqueeze(1)};
    return {a, b, epsilon};
  }
};

bool is_foreground(const Attributes& attributes) {
  const auto mode = attributes.get("mode", Text("iou"));
  one_of("attribute mode", mode, {Text("iou"), Text("iof")});
  return mode == "iof";
}

Request request(
    const Tensor& first, const Tensor& second, const Tensor& out, const Attributes& attributes) {
  const bool centered = attributes.get("trans", false);
  const bool cross = attributes.get("is_cross", true);
  require(first.size(0) == 4 && second.size(0) == 4, "bboxes has shape ", first.sizes(),
      " and gtboxes ", second.sizes(), "; they must be [4, n]");
  require(cross || first.size(1) == second.size(1), "there are ", first.size(1), " bboxes and ",
      second.size(1), " gtboxes, which is_cross = False compares one by one");
  shape("overlap", out, {cross ? second.size(1) : 1, first.size(1)});
  return {first, second, centered, cross, is_foreground(attributes)};
}

// Boxes one by one, the only ones whose gradients op-plugin asks for.
Request backward_request(
    const Tensor& grad, const Tensor& first, const Tensor& second, const Attributes& attributes) {
  require(!attributes.get("is_cross", true) && !is_foreground(attributes),
      "computed: is_cross = False with mode 'iou'");
  require(grad.numel() == first.size(-1), "grad has ", grad.numel(), " values for ", first.size(-1),
      " boxes");
  return request(first, second, grad.view({1, -1}), attributes);
}

// [n, 4] boxes as centers and sizes, which count the last pixel too.
struct Centered {
  Tensor x, y, width, height;
};
Centered centered(const Tensor& boxes) {
  const auto side = boxes.unbind(1);
  return {(side[0] + side[2]) * 0.5, (side[1] + side[3]) * 0.5, side[2] - side[0] + 1,
      side[3] - side[1] + 1};
}

struct Scale {
  Floats means, stds;
};
Scale scale_of(const Attributes& attributes) {
  Scale scale{
      attributes.get("means", Floats{0, 0, 0, 0}), attributes.get("stds", Floats{1, 1, 1, 1})};
  require(scale.means.size() == 4 && scale.stds.size() == 4, "means has ", scale.means.size(),
      " values and stds ", scale.stds.size(), "; each must have 4");
  return scale;
}

void boxes(const char* name, const Tensor& tensor) {
  rank(name, tensor, 2);
  require(tensor.size(1) == 4, name, " has shape ", tensor.sizes(), "; it must be [n, 4]");
}
}  // namespace

GRAPH_OP(GIoU, (Tensor first, Tensor second, Out out, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  COMPUTE {
    const auto pair = given.pair(0);
    const auto common = pair.intersection();
    const auto second_area = (pair.b.x2 - pair.b.x1) * (pair.b.y2 - pair.b.y1);
    const auto both =
        (pair.a.x2 - pair.a.x1) * (pair.a.y2 - pair.a.y1) + second_area - common + 1e-16;
    const auto outer = (pair.width() * pair.height()).abs();
    out.copy_((common / (given.foreground ? second_area : both) - (outer - both) / outer)
            .view(out.sizes()));
  };
})
GRAPH_OP(DIoU, (Tensor first, Tensor second, Out out, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  COMPUTE {
    const auto pair = given.pair(1e-9);
    out.copy_((pair.overlap(given.foreground) - pair.distance()).view(out.sizes()));
  };
})
GRAPH_OP(GIoUGrad,
    (Tensor grad, Tensor first, Tensor second, Out dfirst, Out dsecond, Attributes attributes), {
      const auto given = backward_request(grad, first, second, attributes);
      COMPUTE {
        const auto pair = given.pair(0);
        const auto by = upcast(grad).view(-1);
        const auto common = pair.intersection();
        const auto outer = pair.width() * pair.height();
        const auto areas = (pair.a.x2 - pair.a.x1) * (pair.a.y2 - pair.a.y1) +
                           (pair.b.x2 - pair.b.x1) * (pair.b.y2 - pair.b.y1);
        const auto both = areas - common + 1e-16;
        const auto by_union = by * (1 / outer - common / both.square());
        Slopes slopes(pair);
        slopes.intersection(pair, by / both - by_union);
        slopes.areas(pair, by_union);
        const auto by_outer = -by * both / outer.square();
        slopes.enclosing(pair, by_outer * pair.height(), by_outer * pair.width());
        write(slopes.a, given.centered, dfirst);
        write(slopes.b, given.centered, dsecond);
      };
    })
GRAPH_OP(DIoUGrad,
    (Tensor grad, Tensor first, Tensor second, Out dfirst, Out dsecond, Attributes attributes), {
      const auto given = backward_request(grad, first, second, attributes);
      COMPUTE {
        const auto pair = given.pair(1e-9);
        const auto by = upcast(grad).view(-1);
        const auto common = pair.intersection();
        const auto first_area = (pair.a.x2 - pair.a.x1) * (pair.a.y2 - pair.a.y1 + pair.epsilon);
        const auto both = first_area +
                          (pair.b.x2 - pair.b.x1) * (pair.b.y2 - pair.b.y1 + pair.epsilon) -
                          common + pair.epsilon;
        const auto by_union = -by * common / both.square();
        const auto diagonal = pair.width().square() + pair.height().square() + pair.epsilon;
        Slopes slopes(pair);
        slopes.intersection(pair, by / both - by_union);
        slopes.areas(pair, by_union);
        const auto by_diagonal = by * pair.distance() / diagonal;
        slopes.enclosing(pair, by_diagonal * 2 * pair.width(), by_diagonal * 2 * pair.height());
        slopes.distance(-by * (pair.b.x1 + pair.b.x2 - pair.a.x1 - pair.a.x2) / 2 / diagonal,
            -by * (pair.b.y1 + pair.b.y2 - pair.a.y1 - pair.a.y2) / 2 / diagonal);
        write(slopes.a, given.centered, dfirst);
        write(slopes.b, given.centered, dsecond);
      };
    })
// The second output is the difference of the angles of both diagonals, which the gradient needs.
GRAPH_OP(CIoU, (Tensor first, Tensor second, Out out, Out difference, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  attributes.get("atan_sub_flag", false);
  COMPUTE {
    const double epsilon = 1e-9;
    const auto pair = given.pair(epsilon);
    const auto angle = [&](const Corners& box) {
      return at::atan((box.x2 - box.x1) / (box.y2 - box.y1 + epsilon));
    };
    const auto sub = angle(pair.b) - angle(pair.a);
    const auto overlap = pair.overlap(given.foreground);
    const auto v = sub.square() * (4 / (M_PI * M_PI));
    const auto alpha = v / (1 + epsilon - overlap + v);
    out.copy_((overlap - pair.distance() - v * alpha).view(out.sizes()));
    difference.copy_(sub.view(out.sizes()));
  };
})

// eps is added to each side of an area, on Ascend950 of the intersection too.
GRAPH_OP(Iou, (Tensor first, Tensor second, Out out, Attributes attributes), {
  const bool foreground = is_foreground(attributes);
  const double epsilon = attributes.get("eps", 1.0f);
  boxes("bboxes", first);
  boxes("gtboxes", second);
  SHAPE(out, {second.size(0), first.size(0)});
  COMPUTE {
    const auto a = corners(upcast(first).t(), false);
    const auto b = corners(upcast(second).t().unsqueeze(-1), false);
    const double inner = is_chip("Ascend950") ? epsilon : 0;
    const auto common = (at::minimum(a.x2, b.x2) - at::maximum(a.x1, b.x1) + inner).clamp_min(0) *
                        (at::minimum(a.y2, b.y2) - at::maximum(a.y1, b.y1) + inner).clamp_min(0);
    const auto second_area = (b.x2 - b.x1 + epsilon) * (b.y2 - b.y1 + epsilon);
    const auto first_area = (a.x2 - a.x1 + epsilon) * (a.y2 - a.y1 + epsilon);
    out.copy_(common / (foreground ? second_area : first_area + second_area - common));
  };
})

GRAPH_OP(BoundingBoxDecode, (Tensor rois, Tensor deltas, Out out, Attributes attributes), {
  const auto scale = scale_of(attributes);
  const auto limits = attributes.get("max_shape", Ints());
  const double ratio = attributes.get("wh_ratio_clip", 0.016f);
  require(limits.size() == 2, "max_shape is ", at::IntArrayRef(limits), "; it must have 2 values");
  boxes("rois", rois);
  COMPUTE {
    const auto from = centered(upcast(rois));
    const auto moved = upcast(deltas) * at::tensor(scale.stds) + at::tensor(scale.means);
    const auto most = std::abs(std::log(ratio));
    const auto width = from.width * moved.select(1, 2).clamp(-most, most).exp();
    const auto height = from.height * moved.select(1, 3).clamp(-most, most).exp();
    const auto x = from.x + from.width * moved.select(1, 0);
    const auto y = from.y + from.height * moved.select(1, 1);
    const auto right = static_cast<double>(limits[1] - 1);
    const auto bottom = static_cast<double>(limits[0] - 1);
    out.copy_(at::stack(
        {(x - width * 0.5 + 0.5).clamp(0, right), (y - height * 0.5 + 0.5).clamp(0, bottom),
            (x + width * 0.5 - 0.5).clamp(0, right), (y + height * 0.5 - 0.5).clamp(0, bottom)},
        1));
  };
})
// The last two steps are rounded to float16, also for float32: the expected values of op-plugin's
// test.
GRAPH_OP(BoundingBoxEncode, (Tensor anchors, Tensor targets, Out out, Attributes attributes), {
  const auto scale = scale_of(attributes);
  boxes("anchor_box", anchors);
  COMPUTE {
    const auto from = centered(upcast(anchors));
    const auto to = centered(upcast(targets));
    const auto deltas =
        at::stack({(to.x - from.x) / from.width, (to.y - from.y) / from.height,
                      at::log(to.width / from.width), at::log(to.height / from.height)},
            1);
    out.copy_((deltas.to(at::kHalf) - at::tensor(scale.means).to(at::kHalf)) *
              at::tensor(scale.stds).reciprocal().to(at::kHalf));
  };
})
