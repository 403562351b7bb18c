// What: builds the case of a description.
// Why: see generate.hpp.
// Never: keeps a state between two cases.
#include "yardsticks/linear_cross_entropy/generate.hpp"

#include <cmath>
#include <ostream>

namespace talea::testing {
namespace {

DType hidden_type(Types t) {
  constexpr DType types[] = {DType::f32,  DType::bf16, DType::f16,
                             DType::bf16, DType::f16,  DType::f64};
  return types[static_cast<int>(t)];
}

DType weight_type(Types t) {
  return t == Types::bf16_f32 || t == Types::f16_f32 ? DType::f32 : hidden_type(t);
}

class Builder {
 public:
  explicit Builder(const Spec& s)
      : s_(s),
        random_(s.seed),
        n_(s.tokens),
        d_(s.hidden),
        v_(s.vocab),
        row_(s.types == Types::f64 ? DType::f64 : DType::f32) {
    if (d_ == 0 || v_ == 0 || d_ * v_ >= least_weight) return;
    d_ += 128;
    v_ += (least_weight + d_ - 1) / d_;
  }

  Case build() {
    options();
    matrices();
    if (s_.soft == Soft::none)
      hard_targets();
    else
      soft_targets();
    regime();
    vectors();
    outputs();
    return std::move(c_);
  }

 private:
  void options() {
    LinearCrossEntropyOptions& o = c_.options;
    o.reduction = s_.reduction;
    o.denominator = s_.denominator;
    if (s_.denominator == Denominator::given) o.denominator_value = 3.5;
    o.label_smoothing = s_.label_smoothing;
    o.z_loss = s_.z_loss;
    o.softcap = s_.softcap;
    o.logit_scale = s_.logit_scale;
    o.workspace_limit_bytes = s_.limit_bytes;
    o.threads = s_.threads;
    o.vocab = s_.padding > 0 ? v_ : 0;
    if (s_.ignore_inside) o.ignore_index = v_ / 2;
    if (s_.poison) o.target_check = TargetCheck::poison;
  }

  void matrices() {
    c_.in.hidden = Array(hidden_type(s_.types), {n_, d_}, s_.hidden_view, s_.skew);
    c_.in.weight = Array(weight_type(s_.types), {v_ + s_.padding, d_}, s_.weight_view, s_.skew);
    fill_normal(c_.in.hidden, random_, 1.0);
    fill_normal(c_.in.weight, random_,
                1.5 / std::sqrt(static_cast<double>(std::max<int64_t>(d_, 1))));
    // Whoever reads padding into a softmax will see it.
    const bool own_rows = s_.weight_view != View::expanded;
    for (int64_t v = v_; own_rows && v < v_ + s_.padding; ++v)
      for (int64_t i = 0; i < d_; ++i) c_.in.weight.set(v, i, 30);
    if (!s_.bias) return;
    c_.in.bias = Array(s_.bias_f32 ? row_bias() : weight_type(s_.types), {v_ + s_.padding},
                       View::contiguous, s_.skew);
    fill_normal(c_.in.bias, random_, 0.5);
    for (int64_t v = v_; v < v_ + s_.padding; ++v) c_.in.bias.set(v, 0, 50);
  }

  DType row_bias() const { return s_.types == Types::f64 ? DType::f64 : DType::f32; }

  bool ignored() { return random_.below(100) < s_.ignored_percent; }

  void hard_targets() {
    c_.in.targets = Array(s_.targets_i32 ? DType::i32 : DType::i64, {n_}, View::contiguous);
    for (int64_t t = 0; t < n_; ++t) {
      const int64_t y = random_.below(v_);
      c_.in.targets.set_integer(t, 0, ignored() ? c_.options.ignore_index : y);
    }
    // Just behind the vocabulary: where padding lies, if there is any.
    if (s_.poison && n_ > 0) c_.in.targets.set_integer(n_ / 2, 0, v_);
  }

  void soft_targets() {
    const bool dense = s_.soft == Soft::dense;
    const int64_t k = dense ? v_ : std::min<int64_t>(v_, 3);
    c_.in.soft_target_probs = Array(row_, {n_, k});
    if (!dense) c_.in.soft_target_ids = Array(DType::i64, {n_, k});
    for (int64_t t = 0; t < n_; ++t) {
      double sum = 0;
      std::vector<double> q(static_cast<size_t>(k));
      for (double& share : q) sum += share = random_.uniform();
      const bool skip = s_.soft == Soft::sparse_with_ignored && ignored();
      for (int64_t j = 0; j < k; ++j) {
        c_.in.soft_target_probs.set(t, j, q[static_cast<size_t>(j)] / sum);
        // Ids may repeat: they add up.
        if (!dense)
          c_.in.soft_target_ids.set_integer(t, j,
                                            skip ? c_.options.ignore_index : random_.below(v_));
      }
    }
  }

  // Bends the rows of hidden towards what the regime asks of the logits.
  void regime() {
    if (s_.regime == Regime::normal || d_ == 0) return;
    if (s_.regime == Regime::negative) {
      if (!c_.in.bias.present()) return;
      for (int64_t v = 0; v < v_; ++v) c_.in.bias.set(v, 0, c_.in.bias.get(v) - 150);
      return;
    }
    // Along (confident) or against (distant) the target's own weight row.
    const double sign = s_.regime == Regime::confident ? 1 : -1;
    for (int64_t t = 0; t < n_ && c_.in.targets.present(); ++t) {
      const int64_t y = c_.in.targets.integer(t);
      if (y < 0 || y >= v_ || s_.hidden_view == View::expanded) continue;
      Real norm = 0;
      for (int64_t i = 0; i < d_; ++i) norm += c_.in.weight.get(y, i) * c_.in.weight.get(y, i);
      if (norm == 0) continue;
      const double reach = s_.regime == Regime::confident ? 4 + random_.below(12) : 110;
      for (int64_t i = 0; i < d_; ++i)
        c_.in.hidden.set(t, i, sign * reach * c_.in.weight.get(y, i) / norm);
    }
  }

  using Real = long double;

  Array vector(Upstream kind) {
    constexpr View views[] = {View::contiguous, View::contiguous, View::strided_columns,
                              View::expanded, View::reversed};
    Array a(row_, {n_}, views[static_cast<int>(kind)]);
    fill_normal(a, random_, 1.0, 0.3);
    return a;
  }

  void vectors() {
    if (s_.class_weight) {
      c_.in.class_weight = Array(DType::f32, {v_});
      for (int64_t v = 0; v < v_; ++v)
        c_.in.class_weight.set(v, 0, random_.below(8) == 0 ? 0.0 : 0.25 + random_.uniform());
      c_.in.class_weight.set(0, 0, 0.5);
    }
    if (s_.token_weight) {  // also 0 and negative; the sum stays away from 0
      c_.in.token_weight = Array(DType::f32, {n_});
      for (int64_t t = 0; t < n_; ++t) {
        const int64_t kind = random_.below(6);
        const double w = kind == 0 ? 0.0 : kind == 1 ? -0.25 : 0.5 + random_.uniform();
        c_.in.token_weight.set(t, 0, w);
      }
    }
    if (s_.token_scale) {
      c_.in.token_scale = Array(DType::f32, {n_});
      for (int64_t t = 0; t < n_; ++t) c_.in.token_scale.set(t, 0, 0.5 + random_.uniform());
    }
    if (s_.upstream != Upstream::absent) {
      if (s_.reduction == Reduction::none) {
        c_.in.upstream = vector(s_.upstream);
      } else {
        c_.in.upstream = Array(row_, {});
        c_.in.upstream.set(0, 0, -1.75);
      }
    }
    if (s_.upstream_lse) c_.in.upstream_lse = vector(Upstream::strided);
    if (s_.upstream_entropy) c_.in.upstream_entropy = vector(Upstream::contiguous);
  }

  Array relaid(const Array& a, DType dtype) {
    return Array(dtype, a.shape(), s_.output_view, s_.skew);
  }

  void outputs() {
    want_everything(c_, std::min(s_.top_k, s_.vocab));
    CaseOutputs& out = c_.out;
    if (!s_.wants_rows) {
      out.lse = out.entropy = out.target_logprob = out.argmax = out.accuracy = Array();
      out.topk_ids = out.topk_values = out.topk_logprobs = Array();
    }
    const bool wide = s_.wide_gradients || s_.accumulate;
    const auto gradient = [&](Array& a, bool wanted) {
      if (!a.present()) return;
      a = wanted ? relaid(a, wide && is_16bit(a.dtype()) ? DType::f32 : a.dtype()) : Array();
    };
    gradient(out.dx, s_.wants_dx);
    gradient(out.dw, s_.wants_dw);
    gradient(out.db, s_.wants_db);
    if (!s_.accumulate) return;
    c_.accumulate_dw = out.dw.present();
    c_.accumulate_db = out.db.present();
    if (out.dw.present()) fill_normal(out.dw, random_, 0.1);
    if (out.db.present()) fill_normal(out.db, random_, 0.1);
  }

  const Spec& s_;
  Random random_;
  int64_t n_, d_, v_;
  DType row_;
  Case c_;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Spec& s) {
  return out << "Spec{seed=" << s.seed << " tokens=" << s.tokens << " hidden=" << s.hidden
             << " vocab=" << s.vocab << " padding=" << s.padding << " top_k=" << s.top_k
             << " types=" << static_cast<int>(s.types) << " hidden_view=" << name_of(s.hidden_view)
             << " weight_view=" << name_of(s.weight_view)
             << " output_view=" << name_of(s.output_view) << " skew=" << s.skew
             << " regime=" << static_cast<int>(s.regime)
             << " reduction=" << static_cast<int>(s.reduction)
             << " denominator=" << static_cast<int>(s.denominator) << " bias=" << s.bias
             << " bias_f32=" << s.bias_f32 << " class_weight=" << s.class_weight
             << " token_weight=" << s.token_weight << " token_scale=" << s.token_scale
             << " targets_i32=" << s.targets_i32 << " label_smoothing=" << s.label_smoothing
             << " z_loss=" << s.z_loss << " softcap=" << s.softcap
             << " logit_scale=" << s.logit_scale << " soft=" << static_cast<int>(s.soft)
             << " upstream=" << static_cast<int>(s.upstream) << " upstream_lse=" << s.upstream_lse
             << " upstream_entropy=" << s.upstream_entropy
             << " ignored_percent=" << s.ignored_percent << " ignore_inside=" << s.ignore_inside
             << " poison=" << s.poison << " dx=" << s.wants_dx << " dw=" << s.wants_dw
             << " db=" << s.wants_db << " rows=" << s.wants_rows
             << " wide_gradients=" << s.wide_gradients << " accumulate=" << s.accumulate
             << " limit_bytes=" << s.limit_bytes << " threads=" << s.threads << "}";
}

Case make_case(const Spec& spec) { return Builder(spec).build(); }

}  // namespace talea::testing
