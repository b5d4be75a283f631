// Legacy graph operators of boxes. Boxes are [4, n], corners or, with `trans`, centers and sizes; Iou's and those of
// BoundingBoxEncode and BoundingBoxDecode are [n, 4], corners. The formulas are those of op-plugin's tests: test_npu_giou.py,
// test_npu_diou.py, test_ciou.py, test_iou.py, test_bounding_box_decode.py and test_bounding_box_encode.py.
#include "operator/graph_op.h"
#include "ops/upcast.h"

namespace {
using namespace emu;

struct Corners {
  Tensor x1, y1, x2, y2;
};
Corners corners(const Tensor& boxes, bool centered) {
  if (!centered) return {boxes[0], boxes[1], boxes[2], boxes[3]};
  return {boxes[0] - boxes[2] / 2, boxes[1] - boxes[3] / 2, boxes[0] + boxes[2] / 2, boxes[1] + boxes[3] / 2};
}

// Two sets of boxes, compared one by one, or each of the second with each of the first.
struct Pair {
  Corners a, b;
  double epsilon;
  Tensor intersection() const {
    return (at::minimum(a.x2, b.x2) - at::maximum(a.x1, b.x1)).clamp_min(0) *
           (at::minimum(a.y2, b.y2) - at::maximum(a.y1, b.y1)).clamp_min(0);
  }
  Tensor width() const { return at::maximum(a.x2, b.x2) - at::minimum(a.x1, b.x1); }  // of what encloses both
  Tensor height() const { return at::maximum(a.y2, b.y2) - at::minimum(a.y1, b.y1); }
  Tensor overlap(bool foreground) const {
    const auto common = intersection();
    const auto second = (b.x2 - b.x1) * (b.y2 - b.y1 + epsilon);
    const auto divisor = foreground ? second : (a.x2 - a.x1) * (a.y2 - a.y1 + epsilon) + second - common;
    return common / (divisor + epsilon);
  }
  // Square of the distance of the centers, relative to the diagonal of what encloses both.
  Tensor distance() const {
    const auto x = b.x1 + b.x2 - a.x1 - a.x2;
    const auto y = b.y1 + b.y2 - a.y1 - a.y2;
    return (x * x + y * y) / 4 / (width().square() + height().square() + epsilon);
  }
};

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

Request request(const Tensor& first, const Tensor& second, const Tensor& out, const Attributes& attributes) {
  const bool centered = attributes.get("trans", false);
  const bool cross = attributes.get("is_cross", true);
  one_of("bboxes", first, kFloating);
  same_dtype("gtboxes", second, "bboxes", first);
  rank("bboxes", first, 2);
  rank("gtboxes", second, 2);
  check(first.size(0) == 4 && second.size(0) == 4, kOpParam, "bboxes has shape ", first.sizes(), " and gtboxes ", second.sizes(),
      "; they must be [4, n]");
  check(cross || first.size(1) == second.size(1), kOpParam, "there are ", first.size(1), " bboxes and ", second.size(1),
      " gtboxes, which is_cross = False compares one by one");
  shape("overlap", out, {cross ? second.size(1) : 1, first.size(1)});
  return {first, second, centered, cross, is_foreground(attributes)};
}

// [n, 4] boxes as centers and sizes, which count the last pixel too.
struct Centered {
  Tensor x, y, width, height;
};
Centered centered(const Tensor& boxes) {
  const auto side = boxes.unbind(1);
  return {(side[0] + side[2]) * 0.5, (side[1] + side[3]) * 0.5, side[2] - side[0] + 1, side[3] - side[1] + 1};
}

struct Scale {
  Floats means, stds;
};
Scale scale_of(const Attributes& attributes) {
  Scale scale{attributes.get("means", Floats{0, 0, 0, 0}), attributes.get("stds", Floats{1, 1, 1, 1})};
  check(scale.means.size() == 4 && scale.stds.size() == 4, kOpParam, "means has ", scale.means.size(), " values and stds ",
      scale.stds.size(), "; each must have 4");
  return scale;
}

void boxes(const char* name, const Tensor& tensor) {
  rank(name, tensor, 2);
  check(tensor.size(1) == 4, kOpParam, name, " has shape ", tensor.sizes(), "; it must be [n, 4]");
}
}  // namespace

GRAPH_OP(GIoU, (Tensor first, Tensor second, Out out, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  COMPUTE {
    const auto pair = given.pair(0);
    const auto common = pair.intersection();
    const auto second_area = (pair.b.x2 - pair.b.x1) * (pair.b.y2 - pair.b.y1);
    const auto both = (pair.a.x2 - pair.a.x1) * (pair.a.y2 - pair.a.y1) + second_area - common + 1e-16;
    const auto outer = (pair.width() * pair.height()).abs();
    out.copy_((common / (given.foreground ? second_area : both) - (outer - both) / outer).view(out.sizes()));
  };
})
GRAPH_OP(DIoU, (Tensor first, Tensor second, Out out, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  COMPUTE {
    const auto pair = given.pair(1e-9);
    out.copy_((pair.overlap(given.foreground) - pair.distance()).view(out.sizes()));
  };
})
// The second output is the difference of the angles of both diagonals, which the gradient needs.
GRAPH_OP(CIoU, (Tensor first, Tensor second, Out out, Out difference, Attributes attributes), {
  const auto given = request(first, second, out, attributes);
  attributes.get("atan_sub_flag", false);
  SAME(difference, out);
  COMPUTE {
    const double epsilon = 1e-9;
    const auto pair = given.pair(epsilon);
    const auto angle = [&](const Corners& box) { return at::atan((box.x2 - box.x1) / (box.y2 - box.y1 + epsilon)); };
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
  check(limits.size() == 2, kOpParam, "max_shape is ", at::IntArrayRef(limits), "; it must have 2 values");
  boxes("rois", rois);
  SAME(deltas, rois);
  SAME(out, rois);
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
    out.copy_(at::stack({(x - width * 0.5 + 0.5).clamp(0, right), (y - height * 0.5 + 0.5).clamp(0, bottom),
                            (x + width * 0.5 - 0.5).clamp(0, right), (y + height * 0.5 - 0.5).clamp(0, bottom)},
        1));
  };
})
// The last two steps are rounded to float16, also for float32: the expected values of op-plugin's test.
GRAPH_OP(BoundingBoxEncode, (Tensor anchors, Tensor targets, Out out, Attributes attributes), {
  const auto scale = scale_of(attributes);
  boxes("anchor_box", anchors);
  SAME(targets, anchors);
  SAME(out, anchors);
  COMPUTE {
    const auto from = centered(upcast(anchors));
    const auto to = centered(upcast(targets));
    const auto deltas = at::stack({(to.x - from.x) / from.width, (to.y - from.y) / from.height, at::log(to.width / from.width),
                                      at::log(to.height / from.height)},
        1);
    out.copy_((deltas.to(at::kHalf) - at::tensor(scale.means).to(at::kHalf)) * at::tensor(scale.stds).reciprocal().to(at::kHalf));
  };
})
