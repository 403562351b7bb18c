// What: the oracle against projections of the definition's own program, and lane reference
//       against the oracle to the last digits of fp64.
// Why: definition.py holds itself against central differences and autograd; what it says is stored.
// Never: compares the library with a number that the library made.
#include <cmath>

#include "ops/mamba3/run.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

struct Golden {
  int number;
  const char* name;
  double sums[3];
};
const Golden golden[] = {
#include "ops/mamba3/golden.inc"
};

const char* const names[] = {"q",           "k",         "v",           "z",
                             "adt",         "dt",        "trap",        "angles",
                             "q_bias",      "k_bias",    "d",           "mimo_v",
                             "mimo_z",      "mimo_out",  "norm_weight", "initial_angle",
                             "initial_ssm", "initial_k", "initial_v"};
const char* const states[] = {"angle", "ssm", "k", "v"};

void put(Case& c, const std::string& name, uint64_t seed, double scale = 1, bool positive = false) {
  HostTensor t(DType::f64, shape_of(c, name));
  for (int64_t i = 0; i < t.elements(); ++i) {
    const double x = uniform(seed, i);
    t.set(i, scale * (positive ? std::abs(x) : x));
  }
  c.in[name] = t;
}

// The cases of golden.py.
Case example(int number) {
  Case c;
  c.dtype = DType::f64;
  std::set<std::string> absent;
  if (number == 0) c.size = {2, 7, 4, 1, 8, 3, 1, 2}, absent = {"mimo_v", "mimo_z", "mimo_out"};
  if (number == 1) c.size = {1, 7, 6, 3, 8, 3, 2, 4};
  if (number == 2) c.size = {1, 9, 4, 2, 8, 2, 4, 2}, c.cu = {0, 1, 1, 6, 9};
  if (number == 3) c.size = {2, 5, 4, 4, 6, 3, 2, 3}, absent = {"d", "z", "mimo_z", "mimo_out"};
  c.size.rank_axis = true;
  c.options.rotary_pairs =
      number == 1 ? talea::mamba3::RotaryPairs::halves : talea::mamba3::RotaryPairs::interleaved;
  c.options.head_norm = number == 1;
  if (!c.cu.empty()) {
    c.in["cu_seqlens"] = HostTensor(DType::i32, {static_cast<int64_t>(c.cu.size())});
    for (size_t i = 0; i < c.cu.size(); ++i)
      c.in["cu_seqlens"].set(static_cast<int64_t>(i), static_cast<double>(c.cu[i]));
  }
  uint64_t seed = 1000 * static_cast<uint64_t>(number);
  for (const char* name : names) {
    const std::string n = name;
    if (!absent.count(n))
      put(c, n, seed, n == "adt" ? -0.5 : n == "dt" ? 0.5 : 1, n == "adt" || n == "dt");
    ++seed;
  }
  if (!c.options.head_norm) c.in.erase("norm_weight");
  seed = 1000 * static_cast<uint64_t>(number) + 100;
  put(c, "d_out", seed);
  for (const char* state : states) put(c, std::string("d_final_") + state, ++seed);
  return c;
}

TEST(ScanOracle, MatchesTheDefinitionsProgram) {
  int compared = 0;
  for (int number = 0; number < 4; ++number) {
    const Values answers = oracle(example(number));
    for (const Golden& g : golden) {
      if (g.number != number || !answers.count(g.name)) continue;
      const std::vector<double>& values = answers.at(g.name);
      for (uint64_t i = 0; i < 3; ++i) {
        double sum = 0, size = 1;
        for (size_t j = 0; j < values.size(); ++j) {
          sum += values[j] * uniform(7 + i, static_cast<int64_t>(j));
          size += std::abs(values[j]);
        }
        EXPECT_NEAR(sum, g.sums[i], 1e-13 * size) << number << " " << g.name;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 240);
}

TEST(ScanReference, IsTheOracleToTheLastDigits) {
  for (int number = 0; number < 4; ++number) {
    Case c = example(number);
    const Values truth = oracle(c);
    const Outcome ours = run("reference", c);
    EXPECT_EQ(ours.damage, "");
    for (const auto& [name, tensor] : ours.out)
      EXPECT_LT(relative_l2(tensor.values(), truth.at(name)), 2e-14) << number << " " << name;
    EXPECT_GT(ours.out.size(), 18u);
  }
}

}  // namespace
}  // namespace talea::yardsticks::mamba3
