// What: the list of lanes that sparse attention's tests run on.
// Why: host lanes are always there; a device lane needs its device.
// Never: leaves a host lane out.
#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {

std::vector<std::string> attention_lanes() {
  std::vector<std::string> all;
  const Case c = make_case({});
  sa::Inputs in = inputs_of(c);
  in.d_o = {};
  sa::Options o = c.options;
  for (const std::string& name : sa::lanes()) {
    o.lane = name;
    const auto choice = sa::explain(sa::describe(sa::Pass::forward, in, {}, o));
    if (!choice.lane.empty()) all.push_back(name);
  }
  return all;
}

TEST(SparseAttention, LanesBestFirst) {
  const std::vector<std::string> want = {"sm90", "cuda", "cpu", "unfused", "reference"};
  EXPECT_EQ(sa::lanes(), want);
}

}  // namespace talea::testing
