// What: random problems on every lane, judged against truth and eager arithmetic.
// Why: options, dtypes, sizes and strides meet in combinations nobody would write down.
// Never: unseeded; RC_PARAMS repeats a run, and the printed Spec repeats a failure.
#include "support/hold.hpp"

namespace talea::testing {
namespace {

// A lane of 16-bit products draws its problems in 16 bits.
Types in_16_bits(Types t) {
  return t == Types::f32 ? Types::bf16 : t == Types::f16_f32 ? Types::f16 : t;
}

class Properties : public LaneTest {
 protected:
  void hold_right(int cases, void (*bend)(Spec&)) {
    hold(cases, bend, [this](Spec s) {
      if (needs_16bit_rows(lane())) s.types = in_16_bits(s.types);
      return verify(lane(), make_case(s));
    });
  }
};

TEST_P(Properties, EverythingDrawn) {
  hold_right(2500, [](Spec&) {});
}

TEST_P(Properties, SixteenBit) {
  hold_right(800, [](Spec& s) {
    if (s.types == Types::f32 || s.types == Types::f64) s.types = Types::bf16;
  });
}

TEST_P(Properties, UpstreamVector) {
  hold_right(500, [](Spec& s) {
    s.soft = Soft::none;
    s.reduction = Reduction::none;
    if (s.upstream == Upstream::absent) s.upstream = Upstream::reversed;
  });
}

TEST_P(Properties, ConfidentAndDistantTargets) {
  hold_right(500, [](Spec& s) {
    s.soft = Soft::none;
    s.poison = false;
    s.regime = s.seed % 2 ? Regime::confident : Regime::distant;
  });
}

// Wider than any tile of a few hundred columns, and chunks of few rows.
TEST_P(Properties, WideVocabulary) {
  hold_right(250, [](Spec& s) {
    s.vocab = 200 + static_cast<int>(s.seed % 1500);
    s.tokens = 1 + s.tokens % 9;
    s.limit_bytes = 1 << 14;
  });
}

TALEA_EVERY_LANE(Properties);

}  // namespace
}  // namespace talea::testing
