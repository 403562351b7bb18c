// What: bugs of others that no other suite's cases would meet, and the properties of the whole map.
// Why: a row of docs/museum.md names a test that fails where the bug is planted.
// Never: a tolerance of its own: bits, exact values, or the rule of judge.hpp.
#include <sys/mman.h>

#include <cstring>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanMuseum : public ScanLane {};

TEST_P(ScanMuseum, WideHeads) {
  Sizes s{1, 7, 2, 1, 256, 256, 2, 128};
  s.rank_axis = true;
  Case c = full_case(s, DType::f32, 6);
  chunk(c, 4);
  EXPECT_EQ(verify(lane(), c), "");
}

TEST_P(ScanMuseum, AnglesHandedOnAreReduced) {
  Case c = usual(60, 1);
  for (int64_t i = 0; i < c.in["dt"].elements(); ++i) c.in["dt"].set(i, 3);
  const Values truth = oracle(c);
  const Outcome o = run(lane(), c, {.backward = false});
  const HostTensor& angle = o.out.at("final_angle");
  ASSERT_GT(angle.elements(), 0);
  for (int64_t i = 0; i < angle.elements(); ++i) {
    EXPECT_GE(angle.get(i), 0);
    EXPECT_LT(angle.get(i), 6.2831855);
    // 60 increments of at most 1.5 turns, each rounded to fp32 once.
    EXPECT_NEAR(std::cos(angle.get(i)), std::cos(truth.at("final_angle")[static_cast<size_t>(i)]),
                60 * 1.5 * 0x1p-24 * 6.2831853);
  }
}

TEST_P(ScanMuseum, AStepTakesOneToken) {
  of_errors();
  Case c = usual(1);
  talea::mamba3::StepArguments a;
  a.in = inputs_of(c.in, false);
  a.state = a.in.initial_states;
  a.in.initial_states = {};
  auto options = c.options;
  options.lane = lane();
  try {
    describe(a, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("without the axis S"), std::string::npos) << e.what();
  }
}

// Memory as large as it is called, and untouched: of the host, that nobody pays for, or a device's.
class FarMemory {
 public:
  FarMemory(testing::Place* place, size_t bytes) : place_(place), bytes_(bytes) {
    if (place_)
      data_ = place_->allocate(static_cast<int64_t>(bytes));
    else
      data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~FarMemory() {
    if (!place_) munmap(data_, bytes_);
  }
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;
  void* data() const { return data_; }
  bool made() const { return data_ != MAP_FAILED; }
  void put(int64_t at, const float* from, int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
    float* to = static_cast<float*>(data_) + at;
    if (place_)
      place_->upload(to, from, bytes);
    else
      std::memcpy(to, from, static_cast<size_t>(bytes));
  }

 private:
  testing::Place* place_;
  size_t bytes_;
  void* data_ = nullptr;
};

// Tokens of k and v lie 2^31 and 2^32 elements apart.
TEST_P(ScanMuseum, TokensFurtherApartThan32BitsCanSay) {
  constexpr int64_t apart = (int64_t{1} << 32) + 16;
  const size_t bytes = static_cast<size_t>(apart) * 2 * sizeof(float) + 4096;
  const Case c = usual(3);
  const Outcome near = run(lane(), c, {.backward = false, .only = {"out"}});
  testing::Place* const place = place_of(lane());
  auto inputs = inputs_of(c.in, false);
  HostTensor far(DType::f32, shape_of(c, "out"));
  talea::mamba3::Outputs out;
  out.out = far.view();
  FarMemory k(place, bytes), v(place, bytes);
  ASSERT_TRUE(k.made() && v.made()) << "this machine cannot map " << bytes << " bytes";
  for (auto& [t, memory] : {std::pair{&inputs.k, &k}, std::pair{&inputs.v, &v}}) {
    const int64_t row = t->elements() / 3;
    for (int64_t token = 0; token < 3; ++token)
      memory->put(token * apart, static_cast<const float*>(t->data) + token * row, row);
    t->data = memory->data();
    t->stride[1] = apart;
  }
  Errand errand(lane(), talea::mamba3::Pass::forward, inputs, out, c.options);
  for (const auto& [name, tensor] : c.in) errand.bring(const_cast<HostTensor&>(tensor).bytes());
  errand.bring(far.bytes());
  std::vector<std::byte> room(static_cast<size_t>(errand.workspace_bytes()));
  errand.bring(room);
  errand.run({room.data(), static_cast<int64_t>(room.size())});
  EXPECT_EQ(far.values(), near.out.at("out").values());
}

// ---- Properties of section 11.

// The elements of one axis in another order.
HostTensor shuffled(const HostTensor& t, int axis, const std::vector<int64_t>& order) {
  HostTensor to = part(t, axis, 0, static_cast<int64_t>(order.size()));
  for (size_t i = 0; i < order.size(); ++i)
    put_into(to, part(t, axis, order[i], order[i] + 1), axis, static_cast<int64_t>(i));
  return to;
}

TEST_P(ScanMuseum, SequencesAndHeadsInAnotherOrder) {
  Sizes s{3, 9, 4, 4, 16, 8, 2, 6};
  s.rank_axis = true;
  Case c = full_case(s, DType::f32, 7);
  chunk(c, 4);
  const Outcome plain = run(lane(), c);
  Case other = c;
  const std::vector<int64_t> order = {2, 0, 1};
  for (auto& [name, tensor] : other.in)
    if (tensor.shape()[0] == 3) tensor = shuffled(c.in.at(name), 0, order);
  const Outcome turned = run(lane(), other);
  int compared = 0;
  for (const auto& [name, tensor] : plain.out) {
    if (tensor.shape()[0] != 3) continue;  // a parameter's gradient: another order of the sum
    EXPECT_EQ(shuffled(tensor, 0, order).values(), turned.out.at(name).values()) << name;
    ++compared;
  }
  EXPECT_GT(compared, 15);
}

TEST_P(ScanMuseum, RanksInAnotherOrderAreRounding) {
  Case c = usual(9, 3);
  chunk(c, 4);
  const Values truth = oracle(c);
  const Outcome plain = run("unfused", c);
  Case other = c;
  const std::vector<int64_t> order = {2, 0, 1};
  const auto axis_of = [](const std::string& name) {
    if (name == "q" || name == "k" || name == "d_q" || name == "d_k") return 2;
    if (name.find("bias") != std::string::npos || name.find("mimo") != std::string::npos) return 1;
    return name.size() > 2 && name.compare(name.size() - 2, 2, "_k") == 0 ? 1 : -1;
  };
  for (auto& [name, tensor] : other.in)
    if (const int axis = axis_of(name); axis > 0) tensor = shuffled(c.in.at(name), axis, order);
  Outcome turned = run(lane(), other);
  const std::vector<int64_t> back = {1, 2, 0};
  for (auto& [name, tensor] : turned.out)
    if (const int axis = axis_of(name); axis > 0) tensor = shuffled(tensor, axis, back);
  EXPECT_EQ(judge(c, turned.out, truth, plain.out), "");
}

TEST_P(ScanMuseum, LinearInValuesAndInTheInitialState) {
  Case c = usual(9);
  chunk(c, 4);
  c.in.erase("d");
  Case twice = c;
  for (const char* name : {"v", "initial_ssm", "initial_v"})
    for (int64_t i = 0; i < c.in[name].elements(); ++i)
      twice.in[name].set(i, 2 * c.in[name].get(i));
  const Outcome one = run(lane(), c), two = run(lane(), twice);
  // A factor of two is exact in every product and sum.
  for (const char* name : {"out", "final_ssm", "d_q"}) {
    const HostTensor &a = one.out.at(name), &b = two.out.at(name);
    for (int64_t i = 0; i < a.elements(); ++i) EXPECT_EQ(2 * a.get(i), b.get(i)) << name;
  }
  for (const char* name : {"d_v", "d_initial_ssm"})
    EXPECT_EQ(one.out.at(name).values(), two.out.at(name).values()) << name;
}

TALEA_EVERY_SCAN_LANE(ScanMuseum);

}  // namespace
}  // namespace talea::yardsticks::mamba3
