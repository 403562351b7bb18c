// What: refusals of raw calls: views, overlap, devices, workspace, lanes by name.
// Why: a wrong view that is taken makes wrong numbers, or writes where it must not.
// Never: passes an error without the argument's name in its text.
#include <gtest/gtest.h>

#include <cmath>

#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

constexpr auto usage = ErrorKind::usage;
constexpr auto data = ErrorKind::invalid_data;

// Raw calls: what a placed case cannot express.
struct Raw {
  std::vector<float> x = std::vector<float>(6, 0.5f), w = std::vector<float>(9, 0.25f),
                     dx = std::vector<float>(8), dw = std::vector<float>(9);
  std::vector<int64_t> y = {0, 2};
  float loss = 0;
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  std::vector<char> room = std::vector<char>(1 << 16);

  Raw() {
    in.hidden = make_tensor(x.data(), DType::f32, {2, 3});
    in.weight = make_tensor(w.data(), DType::f32, {3, 3});
    in.targets = make_tensor(y.data(), DType::i64, {2});
    out.loss = make_tensor(&loss, DType::f32, {});
    out.dx = make_tensor(dx.data(), DType::f32, {2, 3});
    options.lane = "reference";
  }
  void call(Workspace workspace) { linear_cross_entropy(in, out, options, workspace); }
  void refused(ErrorKind kind, std::vector<std::string> named) {
    refused({room.data(), static_cast<int64_t>(room.size())}, kind, std::move(named));
  }
  void refused(Workspace workspace, ErrorKind kind, std::vector<std::string> named) {
    try {
      call(workspace);
      ADD_FAILURE() << "accepted where " << named[0] << " is wrong";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      for (const std::string& text : named)
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
            << error.what() << " does not name " << text;
    }
  }
};

TEST(RawCalls, Overlap) {
  Raw a;
  a.out.dx = make_tensor(a.x.data(), DType::f32, {2, 3});
  a.refused(data, {"dx", "hidden"});
  Raw b;  // one element is enough
  b.out.dw = make_tensor(b.dx.data() + 5 - 9 + 1, DType::f32, {3, 3});
  b.out.dw.data = b.dx.data() + 5;
  b.refused(data, {"dx", "dw"});
  Raw c;
  c.out.loss = make_tensor(c.w.data() + 4, DType::f32, {});
  c.refused(data, {"loss", "weight"});
  Raw d;
  d.out.dx.stride[0] = 0;
  d.refused(data, {"dx", "stride 0"});
}

TEST(RawCalls, NullPointersAndDevices) {
  Raw a;
  a.in.weight.data = nullptr;
  a.refused(data, {"weight", "null"});
  Raw b;
  b.in.targets.device = DeviceKind::cuda;
  b.refused(data, {"targets", "cuda"});
  Raw c;
  for (Tensor* t : {&c.in.hidden, &c.in.weight, &c.in.targets, &c.out.loss, &c.out.dx})
    t->device = DeviceKind::cuda;
  c.refused(ErrorKind::unavailable, {"reference", "host memory"});
}

TEST(RawCalls, WorkspaceTooSmall) {
  for (const std::string& lane : lanes_here()) {
    if (is_device_lane(lane)) continue;
    Raw a;
    a.options.lane = lane;
    const int64_t need = workspace_bytes(describe(a.in, a.out, a.options));
    ASSERT_LE(need, static_cast<int64_t>(a.room.size()) * 16384);
    a.room.resize(static_cast<size_t>(need));
    a.refused({nullptr, 0}, usage, {"workspace", std::to_string(need)});
    a.refused({a.room.data(), need - 1}, usage, {"workspace", std::to_string(need)});
    a.call({a.room.data(), need});
    EXPECT_TRUE(std::isfinite(a.loss));
  }
}

// What a C++ caller may put into the plain struct; the C door is behind the same checks.
TEST(RawCalls, ExtentsAndStridesStayWithin64Bits) {
  Raw a;
  a.in.weight.shape[0] = -3;
  a.refused(usage, {"weight", "shape[0] = -3"});
  Raw b;
  b.in.weight.rank = max_rank + 1;
  b.refused(usage, {"weight", "rank = " + std::to_string(max_rank + 1)});
  Raw c;
  c.in.targets.shape[0] = INT64_MAX;
  c.refused(usage, {"targets", std::to_string(INT64_MAX), "overflow"});
  Raw d;
  d.in.hidden.stride[0] = INT64_MIN;
  d.refused(usage, {"hidden", "stride " + std::to_string(INT64_MIN), "overflow"});
}

TEST(RawCalls, AddressesFitTheirDtype) {
  Raw a;
  a.in.hidden.data = reinterpret_cast<char*>(a.x.data()) + 2;
  a.refused(data, {"hidden", "4 bytes of fp32"});
  Raw b;
  b.in.targets.data = reinterpret_cast<char*>(b.y.data()) + 4;
  b.refused(data, {"targets", "8 bytes of int64"});
}

TEST(RawCalls, OutputsDoNotOverlapThemselves) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {3, 3}}) {
    Raw a;
    a.out.dx.stride = {rows, columns};
    a.refused(data, {"dx", "stride", "overlap"});
  }
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{3, 1}, {1, 2}, {1, 3}, {4, 1}}) {
    Raw a;
    a.out.dx.stride = {rows, columns};
    a.call({a.room.data(), static_cast<int64_t>(a.room.size())});
  }
}

TEST(RawCalls, WorkspaceHoldsNoTensor) {
  Raw a;
  const Workspace room = {a.room.data(), static_cast<int64_t>(a.room.size())};
  const int64_t need = workspace_bytes(describe(a.in, a.out, a.options));
  a.in.hidden.data = a.room.data() + 64;
  a.refused(room, data, {"workspace", "hidden"});
  a.in.hidden.data = a.x.data();
  a.out.dx.data = a.room.data() + need - 4;
  a.refused(room, data, {"workspace", "dx"});
  a.out.dx.data = a.room.data() + need;  // beyond what the call uses
  a.call(room);
}

TEST(RawCalls, Lanes) {
  Raw a;
  a.options.lane = "fastest";
  a.refused(usage, {"fastest", "reference"});
  for (const LaneInfo& lane : linear_cross_entropy_lane_table()) {
    if (lane.runs_on == DeviceKind::cpu) continue;  // host tensors: a device lane declines (B13)
    Raw b;
    b.options.lane = lane.name;
    b.refused(ErrorKind::unavailable, {lane.name});
  }
}

TEST(RawCalls, NothingIsWrittenBeforeARefusal) {
  Raw a;
  a.y[1] = 7;
  a.dx.assign(8, 3.25f);
  a.loss = 5;
  a.refused(data, {"targets[1]", "7"});
  EXPECT_EQ(a.loss, 5);
  for (const float g : a.dx) EXPECT_EQ(g, 3.25f);
}

}  // namespace
}  // namespace talea::testing
