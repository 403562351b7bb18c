// What: how rapidcheck draws a description of a problem.
// Why: the distribution of the property tests stands in one place.
// Never: draws a combination that the contract calls an error; tests of errors do that by hand.
#include <rapidcheck.h>

#include "support/hold.hpp"

namespace talea::testing {
namespace {

// Zero more often than not, else one of the values.
template <typename T>
T sometimes(T off, std::vector<T> values) {
  return *rc::gen::weightedElement<bool>({{3, false}, {2, true}})
             ? *rc::gen::elementOf(std::move(values))
             : off;
}

bool chance(int percent) { return *rc::gen::inRange(0, 100) >= 100 - percent; }

}  // namespace

Spec draw_spec() {
  using rc::gen::element;
  Spec s;
  s.seed = *rc::gen::noShrink(rc::gen::inRange<uint64_t>(1, uint64_t{1} << 40));
  s.tokens = chance(5) ? 0 : *rc::gen::inRange(1, 41);
  s.hidden = *element(1, 2, 3, 5, 8, 13, 16, 17, 31, 33);
  s.vocab = chance(4) ? 1 : *rc::gen::inRange(2, 90);
  s.padding = sometimes(0, {1, 5, 16});
  s.top_k = sometimes(0, {1, 2, 5});
  s.types = *element(Types::f32, Types::f32, Types::bf16, Types::f16, Types::bf16_f32,
                     Types::f16_f32, Types::f64);
  const std::vector<View> views = {View::padded_rows, View::transposed, View::expanded,
                                   View::reversed, View::strided_columns};
  s.hidden_view = sometimes(View::contiguous, views);
  s.weight_view = sometimes(View::contiguous, views);
  s.output_view = sometimes(View::contiguous, {View::padded_rows});
  s.skew = sometimes(0, {1, 2, 3});
  s.reduction = *element(Reduction::mean, Reduction::sum, Reduction::none);
  s.denominator = sometimes(Denominator::valid, {Denominator::weighted, Denominator::given});
  s.bias = chance(40);
  s.bias_f32 = chance(50);
  s.class_weight = chance(25);
  s.token_weight = chance(25);
  s.token_scale = chance(20);
  s.targets_i32 = chance(30);
  s.label_smoothing = sometimes(0.0, {0.1, 0.5});
  s.z_loss = sometimes(0.0, {1e-4, 1e-2});
  s.softcap = sometimes(0.0, {5.0, 30.0});
  s.logit_scale = sometimes(1.0, {0.5, -1.25, 2.0});
  s.soft =
      sometimes(Soft::none, {Soft::none, Soft::dense, Soft::sparse, Soft::sparse_with_ignored});
  s.regime = sometimes(Regime::normal, {Regime::confident, Regime::negative, Regime::distant});
  s.upstream = *element(Upstream::absent, Upstream::contiguous, Upstream::strided,
                        Upstream::expanded, Upstream::reversed);
  s.upstream_lse = chance(20);
  s.upstream_entropy = chance(20);
  s.ignored_percent = sometimes(0, {30, 70, 100});
  s.ignore_inside = chance(20);
  s.poison = s.soft == Soft::none && chance(10);
  s.wants_dx = !chance(10);
  s.wants_dw = !chance(10);
  s.wants_db = !chance(10);
  s.wants_rows = !chance(20);
  s.wide_gradients = chance(30);
  s.accumulate = chance(20);
  s.limit_bytes = *element<int64_t>(0, 1 << 14, 1 << 20, 1 << 26);
  s.threads = *element(0, 1, 2, 3);
  return s;
}

}  // namespace talea::testing
