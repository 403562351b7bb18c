// What: the list of lanes that sparse attention's tests run on, and what each can be given.
// Why: the table says what is built and where it runs; a device lane needs its device.
// Never: leaves a built lane out.
#include "ops/sparse_attention/lanes.hpp"

#include "ops/sparse_attention/lane.hpp"

namespace talea::testing {
namespace {

bool built(const sa::Lane& lane) { return std::string(lane.kind) != "not built"; }

std::vector<std::string> lanes_on(DeviceKind kind) {
  std::vector<std::string> names;
  for (const sa::Lane& lane : sa::Operator::lanes())
    if (built(lane) && lane.runs_on == kind) names.emplace_back(lane.name);
  return names;
}

bool on_device(const std::string& name) {
  for (const sa::Lane& lane : sa::Operator::lanes())
    if (name == lane.name) return lane.runs_on == DeviceKind::cuda;
  return false;
}

}  // namespace

std::vector<std::string> host_attention_lanes() { return lanes_on(DeviceKind::cpu); }
std::vector<std::string> device_attention_lanes() { return lanes_on(DeviceKind::cuda); }
std::vector<std::string> attention_lanes() {
  std::vector<std::string> all = device_attention_lanes();
  for (const std::string& name : host_attention_lanes()) all.push_back(name);
  return all;
}

Place* place_of_attention(const std::string& lane, std::string& why) {
  return on_device(lane) ? cuda_place(why) : nullptr;
}

Spec fitted(const std::string& lane, Spec s) {
  if (!on_device(lane)) return s;
  const bool beyond = s.dim > s.value_dim;  // columns that are no value
  s.value_dim = (s.value_dim + 15) / 16 * 16;
  s.dim = std::max((s.dim + 15) / 16 * 16, s.value_dim + (beyond ? 16 : 0));
  if (lane != "sm90") return s;
  if (s.dtype == DType::f32) s.dtype = DType::bf16;
  if (s.storage == sa::KvStorage::fp8_656)
    s.dtype = DType::bf16;
  else
    s.storage = sa::KvStorage::plain;
  s.scaled_q = false;
  s.operands = sa::Operands::native;
  return s;
}

TEST(SparseAttention, LanesBestFirst) {
  const std::vector<std::string> want = {"sm90", "cuda", "cpu", "unfused", "reference"};
  EXPECT_EQ(sa::lanes(), want);
}

}  // namespace talea::testing
