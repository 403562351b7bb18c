// What: the option matrix on every lane: each option alone and in pairs, each dtype and reduction.
// Why: random problems rarely meet one option alone; a bug in one option must name itself.
// Never: draws at random.
#include <functional>

#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

struct Setting {
  const char* name;
  void (*bend)(Spec&);
};

constexpr Setting settings[] = {
    {"plain", [](Spec&) {}},
    {"bias", [](Spec& s) { s.bias = true; }},
    {"bias fp32", [](Spec& s) { s.bias = s.bias_f32 = true; }},
    {"class weights", [](Spec& s) { s.class_weight = true; }},
    {"token weights", [](Spec& s) { s.token_weight = true; }},
    {"token scale", [](Spec& s) { s.token_scale = true; }},
    {"logit scale", [](Spec& s) { s.logit_scale = -1.25; }},
    {"smoothing", [](Spec& s) { s.label_smoothing = 0.1; }},
    {"z-loss", [](Spec& s) { s.z_loss = 0.01; }},
    {"softcap", [](Spec& s) { s.softcap = 5; }},
    {"dense soft targets", [](Spec& s) { s.soft = Soft::dense; }},
    {"sparse soft targets", [](Spec& s) { s.soft = Soft::sparse; }},
    {"ignored sparse rows",
     [](Spec& s) {
       s.soft = Soft::sparse_with_ignored;
       s.ignored_percent = 50;
     }},
    {"upstream", [](Spec& s) { s.upstream = Upstream::contiguous; }},
    {"upstream strided", [](Spec& s) { s.upstream = Upstream::strided; }},
    {"upstream expanded", [](Spec& s) { s.upstream = Upstream::expanded; }},
    {"upstream of lse", [](Spec& s) { s.upstream_lse = true; }},
    {"upstream of entropy", [](Spec& s) { s.upstream_entropy = true; }},
    {"ignored rows", [](Spec& s) { s.ignored_percent = 60; }},
    {"padding", [](Spec& s) { s.padding = 13; }},
    {"weighted denominator",
     [](Spec& s) {
       s.token_weight = true;
       s.denominator = Denominator::weighted;
     }},
    {"given denominator", [](Spec& s) { s.denominator = Denominator::given; }},
    {"top-k", [](Spec& s) { s.top_k = 5; }},
    {"main gradient", [](Spec& s) { s.accumulate = true; }},
    {"fp32 gradients", [](Spec& s) { s.wide_gradients = true; }},
    {"32-bit targets", [](Spec& s) { s.targets_i32 = true; }},
    {"small chunks", [](Spec& s) { s.limit_bytes = 0; }},
    {"everything",
     [](Spec& s) {
       s.bias = s.class_weight = s.token_weight = s.token_scale = true;
       s.label_smoothing = 0.1;
       s.z_loss = 0.01;
       s.softcap = 30;
       s.upstream_lse = s.upstream_entropy = true;
       s.upstream = Upstream::reversed;
       s.top_k = 5;
       s.padding = 3;
       s.ignored_percent = 30;
     }},
};

class Options : public LaneTest {
 protected:
  // Enlarged cases (a forced way) take long: they have the three in turn.
  void every_reduction(Spec s, const std::string& what) {
    constexpr Reduction all[] = {Reduction::mean, Reduction::sum, Reduction::none};
    const int count = least_weight > 0 ? 1 : 3;
    for (int k = 0; k < count; ++k) {
      s.reduction = all[turn_++ % 3];
      expect_right(make_case(s), what);
    }
  }

 private:
  int turn_ = 0;
};
TALEA_EVERY_LANE(Options);

TEST_P(Options, EachAloneForEachType) {
  for (const Types types :
       {Types::f32, Types::bf16, Types::f16, Types::bf16_f32, Types::f16_f32, Types::f64})
    for (const Setting& setting : settings) {
      Spec s{.seed = 11, .tokens = 17, .hidden = 11, .vocab = 67, .types = types};
      setting.bend(s);
      every_reduction(s, setting.name);
    }
}

TEST_P(Options, EachPair) {
  for (const Setting& a : settings)
    for (const Setting& b : settings) {
      if (least_weight > 0 && &b < &a) continue;  // enlarged: each two in one order
      Spec s{.seed = 13, .tokens = 7, .hidden = 5, .vocab = 37};
      a.bend(s);
      b.bend(s);
      s.reduction = Reduction::none;
      expect_right(make_case(s), std::string(a.name) + " with " + b.name);
    }
}

TEST_P(Options, EveryLayout) {
  for (int x = 0; x < view_count; ++x)
    for (int w = 0; w < view_count; ++w)
      for (int skew = 0; skew < 4; ++skew) {
        Spec s{.seed = 17, .tokens = 9, .hidden = 8, .vocab = 33};
        s.types = skew % 2 ? Types::bf16 : Types::f32;
        s.hidden_view = static_cast<View>(x);
        s.weight_view = static_cast<View>(w);
        s.output_view = skew % 2 ? View::padded_rows : View::contiguous;
        s.skew = skew;
        expect_right(make_case(s), std::string(name_of(s.hidden_view)) + " hidden, " +
                                       name_of(s.weight_view) + " weight");
      }
}

TEST_P(Options, EveryLayoutOfTheSmallInputs) {
  for (int v = 0; v < view_count; ++v) {
    Spec s{.seed = 19, .tokens = 9, .hidden = 4, .vocab = 13};
    s.bias = s.class_weight = s.token_weight = s.token_scale = true;
    s.reduction = Reduction::none;
    Case c = make_case(s);
    Random random(v + 1);
    const auto relay = [&](Array& a) {
      const Array old = a;
      a = Array(old.dtype(), old.shape(), static_cast<View>(v));
      for (int64_t i = 0; i < old.shape()[0]; ++i)
        if (is_floating(old.dtype()))
          a.set(i, 0, old.get(i));
        else
          a.set_integer(i, 0, old.integer(i));
    };
    for (Array* a :
         {&c.in.bias, &c.in.targets, &c.in.class_weight, &c.in.token_weight, &c.in.token_scale})
      relay(*a);
    expect_right(c, name_of(static_cast<View>(v)));
  }
}

TEST_P(Options, EverySubsetOfTheGradients) {
  for (int mask = 0; mask < 8; ++mask) {
    Spec s{.seed = 23, .tokens = 9, .hidden = 4, .vocab = 13};
    s.bias = true;
    s.wants_dx = mask & 1;
    s.wants_dw = mask & 2;
    s.wants_db = mask & 4;
    expect_right(make_case(s), "mask " + std::to_string(mask));
  }
}

TEST_P(Options, EachOutputAlone) {
  for (const auto& [name, member] : CaseOutputs::members) {
    Spec s{.seed = 29, .tokens = 9, .hidden = 4, .vocab = 13, .top_k = 3};
    s.bias = true;
    Case c = make_case(s);
    const Array kept = c.out.*member;
    c.out = {};
    c.out.*member = kept;
    expect_right(c, name);
  }
}

// What a gradient needs is summed although no output asks for it.
TEST_P(Options, EachGradientAloneOfEveryUpstream) {
  for (const auto member : {&CaseOutputs::dx, &CaseOutputs::dw, &CaseOutputs::db}) {
    Spec s{.seed = 31, .tokens = 9, .hidden = 4, .vocab = 13};
    s.bias = s.upstream_lse = s.upstream_entropy = true;
    Case c = make_case(s);
    const Array kept = c.out.*member;
    c.out = {};
    c.out.*member = kept;
    expect_right(c, "a gradient alone");
  }
}

// A row of several parts, the last of them odd; without a gradient lane cuda holds one part of the
// logits at a time, with one all of them.
TEST_P(Options, SeveralPartsOfARow) {
  for (const Types types : {Types::f32, Types::bf16})
    for (const Soft soft : {Soft::none, Soft::dense, Soft::sparse})
      for (const bool gradient : {false, true}) {
        Spec s{.seed = 37, .tokens = 3, .hidden = 4, .vocab = 33013, .top_k = 4, .types = types};
        s.bias = s.class_weight = true;
        s.soft = soft;
        s.softcap = 5;
        s.label_smoothing = 0.1;
        s.wants_dx = s.wants_dw = s.wants_db = gradient;
        expect_right(make_case(s), std::string(gradient ? "with" : "without") +
                                       " a gradient, soft targets " +
                                       std::to_string(static_cast<int>(soft)));
      }
}

TEST_P(Options, WithoutTargets) {
  Spec s{.seed = 31, .tokens = 9, .hidden = 4, .vocab = 13, .top_k = 3};
  s.bias = s.upstream_lse = s.upstream_entropy = true;
  Case c = make_case(s);
  c.in.targets = Array();
  want_everything(c, 3);
  expect_right(c);
}

}  // namespace
}  // namespace talea::testing
