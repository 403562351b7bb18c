// What: places a case, runs a lane on it and fetches the outputs.
// Why: see run.hpp.
// Never: reads a value as a number.
#include "yardsticks/linear_cross_entropy/run.hpp"

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "yardsticks/linear_cross_entropy/limit.hpp"

namespace talea::testing {
namespace {

constexpr int64_t fence_bytes = 256;

struct Placed {
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  std::map<std::string, void*> base;
};

void* put(Place& place, const Array& a) {
  void* base = place.allocate(static_cast<int64_t>(a.block().size()));
  place.upload(base, a.block().data(), static_cast<int64_t>(a.block().size()));
  return base;
}

Placed put(Place& place, const Case& c) {
  Placed p;
  const auto view = [&](const char* name, const Array& a) -> Tensor {
    if (!a.present()) return {};
    return a.at(p.base[name] = put(place, a), place.kind());
  };
  p.in = inputs_of(c.in, view);
  p.out = outputs_of(c, c.out, view);
  return p;
}

// Brings the outputs back and reports every byte that changed outside them.
Outcome fetch(Place& place, const Case& c, const Placed& p) {
  Outcome o;
  o.out = c.out;
  for (const auto& [name, member] : CaseOutputs::members) {
    Array& a = o.out.*member;
    if (!a.present()) continue;
    const std::vector<std::byte> before = a.block();
    place.download(a.block().data(), p.base.at(name), static_cast<int64_t>(a.block().size()));
    const std::vector<bool> outside = a.outside();
    for (size_t b = 0; b < before.size(); ++b)
      if (outside[b] && a.block()[b] != before[b]) {
        o.damage += fmt::format("{}: byte {} outside the tensor was written\n", name, b);
        break;
      }
  }
  for (const auto& [name, member] : CaseInputs::members) {
    const Array& a = c.in.*member;
    if (!a.present()) continue;
    std::vector<std::byte> after(a.block().size());
    place.download(after.data(), p.base.at(name), static_cast<int64_t>(after.size()));
    if (std::memcmp(after.data(), a.block().data(), after.size()) != 0)
      o.damage += fmt::format("{}: the input was changed\n", name);
  }
  return o;
}

struct Cleanup {
  Place& place;
  ~Cleanup() { place.reset(); }
};

struct Count {
  int64_t accepted = 0, runs = 0;
  std::map<std::string, int64_t> declined;
};
std::map<std::string, Count>& counts() {
  static std::map<std::string, Count> all;
  return all;
}

}  // namespace

Outcome run_lane(Place& place, const std::string& lane, const Case& given,
                 const LinearCrossEntropyRanks& ranks) {
  const Case c = fitted(lane, given);
  Cleanup cleanup{place};
  Placed p = put(place, c);
  LinearCrossEntropyOptions options = c.options;
  options.lane = lane;
  options = with_kept_limit(p.in, p.out, options, ranks);
  const int64_t bytes = workspace_bytes(describe(p.in, p.out, options, ranks));
  constexpr int64_t skew = 8;  // the caller's address need not be aligned
  std::vector<std::byte> block(static_cast<size_t>(bytes + 2 * fence_bytes + skew),
                               std::byte{0xff});
  char* base = static_cast<char*>(place.allocate(static_cast<int64_t>(block.size())));
  place.upload(base, block.data(), static_cast<int64_t>(block.size()));
  Workspace workspace{base + fence_bytes + skew, bytes};
  const LinearCrossEntropyResult result =
      linear_cross_entropy(p.in, p.out, options, workspace, ranks, place.stream());
  if (ranks.vocab) ranks.vocab->wait(place.stream());  // throws where a rank was lost
  Outcome o = fetch(place, c, p);
  o.result = result;
  place.download(block.data(), base, static_cast<int64_t>(block.size()));
  for (int64_t b = 0; b < static_cast<int64_t>(block.size()); ++b) {
    const bool fence = b < fence_bytes + skew || b >= fence_bytes + skew + bytes;
    if (fence && block[static_cast<size_t>(b)] != std::byte{0xff}) {
      o.damage +=
          fmt::format("workspace: byte {} of {} was written\n", b - fence_bytes - skew, bytes);
      break;
    }
  }
  if (result.workspace_bytes != bytes)
    o.damage += fmt::format("result: workspace_bytes {} where {} were declared\n",
                            result.workspace_bytes, bytes);
  count_run(lane);
  if (result.lane != lane) o.damage += "result: lane " + result.lane + " ran, not " + lane + "\n";
  return o;
}

std::optional<std::string> declines(Place& place, const std::string& lane, const Case& given,
                                    const LinearCrossEntropyRanks& ranks) {
  const Case c = fitted(lane, given);
  Cleanup cleanup{place};
  Placed p = put(place, c);
  LinearCrossEntropyOptions options = c.options;
  options.lane = lane;
  options = with_kept_limit(p.in, p.out, options, ranks);
  const LaneChoice choice = explain(describe(p.in, p.out, options, ranks));
  if (!choice.lane.empty()) return std::nullopt;
  for (const LaneDecline& d : choice.declined)
    if (d.lane == lane) return d.reason;
  return "";
}

std::string verify(const std::string& lane, const Case& c, const Yardsticks& y) {
  std::string why;
  Place* place = place_of(lane, why);
  if (!place) return why + "\n";
  if (const auto reason = declines(*place, lane, c)) {
    ++counts()[lane].declined[*reason];
    // A reason names something of the problem or the machine.
    if (reason->size() < 8) return "lane " + lane + " declines without a reason\n";
    if (!may_decline(lane, c)) return "lane " + lane + " must accept, but: " + *reason + "\n";
    return "";
  }
  ++counts()[lane].accepted;
  const Outcome o = run_lane(*place, lane, c);
  return o.damage + judge(c, o.out, y, standing_of(lane, o.result));
}

std::string verify(const std::string& lane, const Case& c) {
  const Case f = fitted(lane, c);
  return verify(lane, f, yardsticks(f));
}

int64_t runs_of(const std::string& lane) { return counts()[lane].runs; }
void count_run(const std::string& lane) { ++counts()[lane].runs; }

std::string tally() {
  std::string text;
  for (const auto& [lane, count] : counts()) {
    int64_t declined = 0;
    for (const auto& [reason, n] : count.declined) declined += n;
    text += fmt::format("lane {}: {} accepted, {} declined, {} runs\n", lane, count.accepted,
                        declined, runs_of(lane));
    for (const auto& [reason, n] : count.declined) text += fmt::format("  {} x {}\n", n, reason);
  }
  return text;
}

}  // namespace talea::testing
