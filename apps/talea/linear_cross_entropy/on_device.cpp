// What: see on_device.hpp.
// Why: see on_device.hpp.
// Never: writes an output before the call has succeeded.
#include "on_device.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/fields.hpp"

namespace talea::cli {
namespace {

// Bytes from the first element to behind the last, whatever the strides between them.
int64_t span_bytes(const Tensor& t) {
  if (t.elements() == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < t.rank; ++i) {
    require(t.stride[i] >= 0, ErrorKind::invalid_data, "stride {} of a tensor for a device",
            t.stride[i]);
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return (last + 1) * size_of(t.dtype);
}

Tensor placed(Device& device, const Tensor& t, bool with_data) {
  if (!t) return t;
  Tensor there = t;
  const int64_t bytes = span_bytes(t);
  there.device = DeviceKind::cuda, there.device_index = device.index;
  there.data = device.session->allocate(std::max<int64_t>(bytes, 1));
  if (with_data) device.session->upload(there.data, t.data, bytes);
  return there;
}

DeviceKind device_of_lane(const std::string& lane) {
  for (const LaneInfo& info : linear_cross_entropy_lane_table())
    if (info.name == lane) return info.runs_on;
  return DeviceKind::cpu;  // auto, or a name that the call itself refuses
}

}  // namespace

Device open_device(const std::string& device, const std::string& lane) {
  const bool named = lane != "auto";
  const DeviceKind kind = device_of_lane(lane);
  const std::string word = device != "auto" ? device : kind == DeviceKind::cpu ? "cpu" : "cuda:0";
  Device found;
  const bool on_host = word == "cpu";
  if (!on_host) {
    const std::string_view number = std::string_view(word).substr(std::min<size_t>(5, word.size()));
    const auto end = number.data() + number.size();
    const bool right =
        word == "cuda" ||
        (word.starts_with("cuda:") && !number.empty() &&
         std::from_chars(number.data(), end, found.index).ptr == end && found.index >= 0);
    require(right, ErrorKind::usage, "--device {}: one of auto, cpu, cuda, cuda:0, cuda:1, ...",
            word);
  }
  require(!named || on_host == (kind == DeviceKind::cpu), ErrorKind::usage,
          "--device {}: lane {} runs on {}", word, lane, on_host ? "a GPU" : "the host");
  if (on_host) return found;
  std::string why;
  found.session = DeviceSession::open(found.index, why);
  const std::string asked =
      device == "auto" ? fmt::format("--lane {}", lane) : fmt::format("--device {}", word);
  require(found.session != nullptr, ErrorKind::unavailable, "{}: {}", asked, why);
  return found;
}

DeviceProvenance device_provenance(DeviceSession& session, const std::vector<DeviceClocks>& all) {
  std::vector<double> sm;
  std::string reasons;
  for (const DeviceClocks& c : all) {
    sm.push_back(c.sm_mhz);
    if (reasons.find(c.throttle_reasons) == std::string::npos)
      reasons += (reasons.empty() ? "" : "; ") + c.throttle_reasons;
  }
  std::sort(sm.begin(), sm.end());
  return {session.name(), all.back().driver, session.runtime(),
          fmt::format("SM {:.0f} to {:.0f} MHz, median {:.0f}, memory {} MHz", sm.front(),
                      sm.back(), sm[sm.size() / 2], all.back().memory_mhz),
          reasons};
}

MeasuredCall call_on_device(Device& device, const LinearCrossEntropyInputs& in,
                            const LinearCrossEntropyOutputs& out,
                            const LinearCrossEntropyOptions& options) {
  DeviceSession& session = *device.session;
  LinearCrossEntropyInputs there = in;
  for (const auto& field : lce::input_fields)
    there.*field.member = placed(device, in.*field.member, true);
  LinearCrossEntropyOutputs made = out;
  for (const auto& field : lce::output_fields)
    made.*field.member = placed(device, out.*field.member, true);  // dW may be added to
  MeasuredCall call;
  call.problem = describe(there, made, options);
  call.logits_columns = call.problem.vocab_local;
  const int64_t bytes = workspace_bytes(call.problem);
  const Workspace workspace{session.allocate(std::max<int64_t>(bytes, 1)), bytes};
  session.synchronise();
  const int64_t before = session.free_bytes();
  const auto begin = std::chrono::steady_clock::now();
  call.result = linear_cross_entropy(there, made, options, workspace, {}, session.stream());
  session.synchronise();
  const auto end = std::chrono::steady_clock::now();
  call.peak_extra_bytes = bytes + std::max<int64_t>(0, before - session.free_bytes());
  call.ms = std::chrono::duration<double, std::milli>(end - begin).count();
  for (const auto& field : lce::output_fields)
    if (const Tensor& t = out.*field.member)
      session.download(t.data, (made.*field.member).data, span_bytes(t));
  return call;
}

}  // namespace talea::cli
