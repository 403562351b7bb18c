// What: an accumulation window of unequal micro-batches against the one batch they make up.
// Why: a mean of means, or a window not divided by what it holds, is a wrong gradient (B23).
// Never: draws at random.
#include "support/lane_test.hpp"

namespace talea::testing {
namespace {

class Window : public LaneTest {};
TALEA_EVERY_LANE(Window);

// Rows first .. first + rows of a case, with the mean over the whole window.
Case part_of(const Case& whole, int64_t first, int64_t rows, double denominator) {
  Case part = whole;
  part.in.hidden = Array(whole.in.hidden.dtype(), {rows, whole.hidden()});
  part.in.targets = Array(DType::i64, {rows});
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < whole.hidden(); ++i)
      part.in.hidden.set(t, i, whole.in.hidden.get(first + t, i));
    part.in.targets.set_integer(t, 0, whole.in.targets.integer(first + t));
  }
  part.options.denominator = Denominator::given;
  part.options.denominator_value = denominator;
  want_everything(part);
  part.out.dw = Array(DType::f32, {whole.vocab(), whole.hidden()});
  part.accumulate_dw = true;
  return part;
}

TEST_P(Window, UnequalPartsAreOneMean) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case whole = plain_case({.tokens = 24, .hidden = 8, .vocab = 19, .dtype = dtype});
    for (const int64_t t : {1, 2, 3, 20}) whole.in.targets.set_integer(t, 0, -100);
    whole.out.dw = Array(DType::f32, {19, 8});
    if (!accepts(whole)) continue;
    Array dw(DType::f32, {19, 8});
    for (int64_t v = 0; v < 19; ++v)
      for (int64_t i = 0; i < 8; ++i) dw.set(v, i, 0);
    Array loss(DType::f32, {});
    Real sum = 0;
    LinearCrossEntropyResult last;
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 5}, {5, 1}, {6, 18}}) {
      Case part = part_of(whole, first, rows, 20);
      part.out.dw = dw;
      const Outcome o = run(part);
      dw = o.out.dw;
      sum += o.out.loss.get();
      last = o.result;
    }
    loss.set(0, 0, sum);
    CaseOutputs joined;
    joined.dw = dw;
    joined.loss = loss;
    EXPECT_EQ(judged(whole, joined, last, yardsticks(whole)), "") << name_of(dtype);
  }
}

}  // namespace
}  // namespace talea::testing
