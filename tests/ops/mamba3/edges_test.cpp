// What: values at the edges: no step, no decay, resets, infinities, NaN, one tensor absent.
// Why: rows of section 5 about values, on every lane.
// Never: a tolerance of its own: bits, exact zeros, or the rule of judge.hpp.
#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanEdges : public ScanLane {};

int64_t early(const Case& c, int64_t h, int64_t t) { return h * c.size.S + t; }

TEST_P(ScanEdges, NoStepNoInput) {
  Case c = usual(12);
  chunk(c, 4);
  for (const int64_t t : {0, 3, 6, 7, 11}) c.in["dt"].set(early(c, 1, t), 0);
  EXPECT_EQ(verify(lane(), c), "");
  const Outcome o = run(lane(), c);
  const int64_t A = c.size.A;
  for (const int64_t t : {0, 3, 6, 7, 11}) {
    EXPECT_EQ(o.out.at("d_trap").get(early(c, 1, t)), 0) << t;
    for (int64_t i = 0; i < A; ++i) EXPECT_EQ(o.out.at("d_angles").get((t * 4 + 1) * A + i), 0);
  }
  // The key of 6 has no gamma and, the step after it being 0 too, no b: all heads of its group.
  for (int64_t h = 0; h < 4; ++h)
    for (const int64_t t : {6, 7}) c.in["dt"].set(early(c, h, t), 0);
  const HostTensor d_k = run(lane(), c).out.at("d_k");
  const int64_t width = d_k.elements() / 12;
  for (int64_t i = 0; i < width; ++i) EXPECT_EQ(d_k.get(6 * width + i), 0);
}

TEST_P(ScanEdges, DecayOfOne) {
  Case c = usual(40);
  for (int64_t i = 0; i < c.in["adt"].elements(); ++i) c.in["adt"].set(i, 0);
  EXPECT_EQ(verify(lane(), c), "");
}

TEST_P(ScanEdges, AResetCutsExactly) {
  for (const double reset : {double{-INFINITY}, -128.0, -1e4}) {
    Case c = usual(14);
    chunk(c, 5);
    for (const char* s : {"angle", "ssm", "k", "v"}) c.in.erase("d_final_" + std::string(s));
    for (int64_t h = 0; h < 4; ++h) c.in["adt"].set(early(c, h, 7), reset);
    const int64_t width = c.in["d_out"].elements() / 14;
    for (int64_t i = 0; i < 7 * width; ++i) c.in["d_out"].set(i, 0);
    EXPECT_EQ(verify(lane(), c), "") << reset;
    const Outcome o = run(lane(), c);
    for (const auto& [name, tensor] : o.out) EXPECT_TRUE(all_finite(tensor)) << name;
    for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(o.out.at("d_adt").get(early(c, h, 7)), 0);
    for (const char* name : {"d_k", "d_v"}) {
      const HostTensor& d = o.out.at(name);
      for (int64_t i = 0; i < d.elements() / 14 * 7; ++i) EXPECT_EQ(d.get(i), 0) << name << i;
    }
    for (const double x : o.out.at("d_initial_ssm").values()) EXPECT_EQ(x, 0);
  }
}

TEST_P(ScanEdges, GrowthIsNotClamped) {
  Case c = usual(10);
  chunk(c, 4);
  const Outcome before = run(lane(), c, {.backward = false});
  Case grown = c;
  for (int64_t h = 0; h < 4; ++h) grown.in["adt"].set(early(c, h, 5), 1.5);
  EXPECT_EQ(verify(lane(), grown), "");
  grown = c;
  grown.in["adt"].set(early(c, 2, 5), 1e6);
  const Outcome after = run(lane(), grown, {.backward = false});
  const HostTensor &a = before.out.at("out"), &b = after.out.at("out");
  int lost = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    const int64_t t = i / (4 * 8), h = i / 8 % 4;
    if (h != 2 || t < 4) {
      EXPECT_EQ(a.get(i), b.get(i)) << i;
    } else if (t >= 5) {
      lost += !std::isfinite(b.get(i));
    }
  }
  EXPECT_EQ(lost, 5 * 8);
  Case back = c;
  for (int64_t i = 0; i < back.in["dt"].elements(); i += 3)
    back.in["dt"].set(i, -back.in["dt"].get(i));
  EXPECT_EQ(verify(lane(), back), "");
}

TEST_P(ScanEdges, InfiniteLogitsAndRates) {
  Case c = usual(12);
  chunk(c, 5);
  const double values[] = {INFINITY, -INFINITY, 1e4, -1e4};
  for (int64_t t = 0; t < 4; ++t) {
    c.in["trap"].set(early(c, 1, 2 * t + 1), values[t]);
    for (int64_t i = 0; i < c.size.A; ++i)
      c.in["angles"].set(((2 * t + 2) * 4 + 1) * c.size.A + i, values[t]);
  }
  EXPECT_EQ(verify(lane(), c), "");
  const Outcome o = run(lane(), c);
  for (int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(o.out.at("d_trap").get(early(c, 1, 2 * t + 1)), 0);
    for (int64_t i = 0; i < c.size.A; ++i)
      EXPECT_EQ(o.out.at("d_angles").get(((2 * t + 2) * 4 + 1) * c.size.A + i), 0);
  }
}

// Elements of out that differ or are not finite: exactly those of tokens from `from` to `to` of the
// heads that read the row.
void expect_only(const Case& c, const HostTensor& a, const HostTensor& b, int64_t from, int64_t to,
                 const std::set<int64_t>& heads, int64_t chunk, const std::string& what) {
  int reached = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    const int64_t t = i / (c.size.H * c.size.P), h = i / c.size.P % c.size.H;
    const bool reads = heads.count(h) > 0 && t <= to;
    if (!reads || t < from / chunk * chunk) {
      EXPECT_EQ(a.get(i), b.get(i)) << what << " token " << t << " head " << h;
    } else if (t >= from) {
      reached += std::isnan(b.get(i));
    }
  }
  EXPECT_GT(reached, 0) << what;
}

TEST_P(ScanEdges, NaNStaysWhereItBelongs) {
  Case c = usual(15);
  chunk(c, 5);
  const int64_t C = lane() == "reference" ? 1 : 5;
  const HostTensor good = run(lane(), c, {.backward = false}).out.at("out");
  const auto reached = [&](const std::string& name, int64_t flat, int64_t last,
                           const std::set<int64_t>& heads) {
    Case bad = c;
    bad.in[name].set(flat, NAN);
    expect_only(c, good, run(lane(), bad, {.backward = false}).out.at("out"), 7, last, heads, C,
                name);
  };
  const int64_t N = c.size.N, G = 2, R = 2, A = c.size.A;
  reached("q", ((7 * R + 1) * G + 1) * N + 3, 7, {2, 3});
  reached("z", (7 * 4 + 1) * 8 + 2, 7, {1});
  reached("k", ((7 * R + 1) * G + 0) * N + 3, 14, {0, 1});
  reached("v", (7 * 4 + 3) * 8 + 2, 14, {3});
  reached("adt", early(c, 2, 7), 14, {2});
  reached("dt", early(c, 2, 7), 14, {2});
  reached("angles", (7 * 4 + 1) * A + 2, 14, {1});
}

TEST_P(ScanEdges, TheFutureChangesNothing) {
  Case c = usual(15);
  chunk(c, 6);
  const HostTensor before = run(lane(), c, {.backward = false}).out.at("out");
  for (const char* name : {"q", "k", "v", "z", "angles"}) {
    Case other = c;
    HostTensor& t = other.in[name];
    const int64_t width = t.elements() / 15;
    for (int64_t i = 9 * width; i < t.elements(); ++i) t.set(i, 2 * t.get(i) + 1);
    const HostTensor after = run(lane(), other, {.backward = false}).out.at("out");
    for (int64_t i = 0; i < 9 * 32; ++i) EXPECT_EQ(before.get(i), after.get(i)) << name;
    EXPECT_NE(before.values(), after.values());
  }
}

TEST_P(ScanEdges, AbsentIsNeutral) {
  for (const int64_t R : {1, 2}) {
    Case whole = usual(11, R);
    chunk(whole, 4);
    whole.options.head_norm = true;
    fill(whole, "norm_weight", DType::f32, 1);
    std::vector<std::string> names = {"q_bias",      "k_bias",      "d",        "mimo_v",
                                      "mimo_z",      "norm_weight", "angles",   "initial_angle",
                                      "initial_ssm", "initial_k",   "initial_v"};
    if (R == 1) names.push_back("mimo_out");
    for (const std::string& name : names) {
      Case neutral = whole, absent = whole;
      const double value = name.find("mimo") == 0 || name == "norm_weight" ? 1 : 0;
      for (int64_t i = 0; i < neutral.in[name].elements(); ++i) neutral.in[name].set(i, value);
      absent.in.erase(name);
      const Outcome a = run(lane(), neutral), b = run(lane(), absent);
      EXPECT_EQ(same_bits(a.out, b.out), "") << name;
    }
  }
}

TEST_P(ScanEdges, NormOfAZeroRow) {
  Case c = usual(9);
  c.options.head_norm = true;
  fill(c, "norm_weight", DType::f32, 1);
  for (const char* name : {"v", "initial_ssm", "initial_v"})
    for (int64_t i = 0; i < c.in[name].elements(); ++i) c.in[name].set(i, 0);
  for (const auto& [name, tensor] : run(lane(), c).out) EXPECT_TRUE(all_finite(tensor)) << name;
}

TEST_P(ScanEdges, AConstantTurnIsNoTurn) {
  Case c = usual(13);
  for (const char* s : {"ssm", "k", "v"}) {
    c.in.erase("initial_" + std::string(s));
    c.in.erase("d_final_" + std::string(s));
  }
  c.in.erase("d_final_angle");
  const Values truth = oracle(c);
  const Outcome plain = run("unfused", c, {.backward = false});
  Case turned = c;
  for (int64_t i = 0; i < c.in["initial_angle"].elements(); ++i)
    turned.in["initial_angle"].set(i, c.in["initial_angle"].get(i) + 1.25);
  const Outcome o = run(lane(), turned, {.backward = false, .only = {"out"}});
  EXPECT_EQ(judge(c, o.out, truth, plain.out), "");
}

TALEA_EVERY_SCAN_LANE(ScanEdges);

}  // namespace
}  // namespace talea::yardsticks::mamba3
