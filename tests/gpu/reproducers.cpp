// What: every reproducer on a device: the bug is shown, ours is right, and ours has left the host.
// Why: a reproducer that stays on the host under --device cuda says nothing of the device's lanes.
// Never: judges what a reproducer shows beyond its own sentinels.
#include <gtest/gtest.h>

#include "gpu/batch.hpp"
#include "repro/support/repro.hpp"

namespace talea::gpu {
namespace {

class Reproducers : public ::testing::TestWithParam<repro::Reproducer> {
 protected:
  void TearDown() override { repro::run_on(nullptr); }
};

TEST_P(Reproducers, OnADevice) {
  std::string why;
  const auto session = DeviceSession::open(0, why);
  ASSERT_TRUE(session) << why;
  repro::run_on(session.get());
  const int64_t before = counted_allocations();
  repro::Report report(false);
  GetParam().run(report);
  for (const repro::Finding& f : report.findings())
    EXPECT_NE(f.sentinel, "") << f.what << ": " << f.measured << ", bound " << f.bound;
  EXPECT_TRUE(report.complete());
  if (GetParam().on_host)
    EXPECT_EQ(counted_allocations(), before) << "it does not stay on the host";
  else
    EXPECT_GT(counted_allocations(), before) << "nothing ran on the device";
}

INSTANTIATE_TEST_SUITE_P(All, Reproducers, ::testing::ValuesIn(repro::all()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace talea::gpu
