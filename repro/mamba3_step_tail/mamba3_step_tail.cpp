// What: a step that writes tiles of 64 columns where a head has 48: the neighbour's values are
// lost.
// Why: with 64 or 128 columns nothing is wrong, and nothing else is tested.
// Never: writes outside memory of its own: the neighbour here is a guard.
#include <algorithm>
#include <optional>

#include "repro/support/on_device.hpp"
#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

constexpr int64_t H = 3, N = 8, P = 48, tile = 64;
constexpr float mark = 1234.5f;

// out [H, P] and what lies behind it, written in tiles: the last of a head runs into the next.
int64_t overwritten_by_tiles() {
  std::vector<float> memory(static_cast<size_t>(H * P + tile), mark);
  for (int64_t h = H; h-- > 0;)
    for (int64_t p = 0; p < tile; ++p)
      memory[static_cast<size_t>(h * P + p)] = static_cast<float>(h);
  int64_t lost = 0;
  for (int64_t h = 0; h < H; ++h)
    for (int64_t p = 0; p < P; ++p)
      lost += memory[static_cast<size_t>(h * P + p)] != static_cast<float>(h);
  for (int64_t i = H * P; i < H * P + tile; ++i) lost += memory[static_cast<size_t>(i)] != mark;
  return lost;
}

struct Stepped {
  Values t;
  int64_t lost = 0;  // elements of guards that changed
};

// One token from drawn states, every tensor written between guards.
Stepped step_on_guards(const Scan& s, const std::string& lane) {
  const auto guarded = [&](const std::vector<float>& values) {
    std::vector<float> block(values.size() + 2 * tile, mark);
    std::copy(values.begin(), values.end(), block.begin() + tile);
    return block;
  };
  auto out = guarded(std::vector<float>(static_cast<size_t>(H * P), 0.f));
  auto ssm = guarded(s.in.at("initial_ssm")), k = guarded(s.in.at("initial_k"));
  auto v = guarded(s.in.at("initial_v"));
  std::optional<OnDevice> device;
  if (device_in_use() && lane == "auto") device.emplace();
  // What lies behind `guard` elements of a block, which goes to the device whole.
  const auto part = [&](const std::vector<float>& block, int64_t guard,
                        std::initializer_list<int64_t> shape) {
    Tensor whole = make_tensor(block.data(), DType::f32, {static_cast<int64_t>(block.size())});
    if (device) device->take(whole, guard > 0);
    return make_tensor(static_cast<float*>(whole.data) + guard, DType::f32, shape, whole.device);
  };
  mamba3::StepArguments a;
  a.in.q = part(s.in.at("q"), 0, {1, 1, N});
  a.in.k = part(s.in.at("k"), 0, {1, 1, N});
  a.in.v = part(s.in.at("v"), 0, {1, H, P});
  a.in.adt = part(s.in.at("adt"), 0, {1, H});
  a.in.dt = part(s.in.at("dt"), 0, {1, H});
  a.in.trap = part(s.in.at("trap"), 0, {1, H});
  a.out = part(out, tile, {1, H, P});
  a.state.ssm = part(ssm, tile, {1, H, P, N});
  a.state.k = part(k, tile, {1, H, N});
  a.state.v = part(v, tile, {1, H, P});
  mamba3::Options options;
  options.lane = lane;
  const int64_t bytes = workspace_bytes(describe(a, options));
  if (device) {
    step(a, options, device->workspace(bytes), device->stream());
    device->finish();
  } else {
    std::vector<double> memory(static_cast<size_t>(bytes / 8 + 1));
    step(a, options, {memory.data(), static_cast<int64_t>(memory.size() * 8)});
  }
  Stepped made;
  const auto keep = [&](const char* name, const std::vector<float>& block) {
    made.t[name].assign(block.begin() + tile, block.end() - tile);
    for (int64_t i = 0; i < tile; ++i)
      made.lost += (block[static_cast<size_t>(i)] != mark) +
                   (block[block.size() - 1 - static_cast<size_t>(i)] != mark);
  };
  keep("out", out), keep("ssm", ssm), keep("k", k), keep("v", v);
  return made;
}

void run_all(Report& r) {
  const int64_t lost = overwritten_by_tiles();
  r.broken("48 columns in tiles of 64: elements of others overwritten", static_cast<double>(lost),
           0);
  const Scan s = draw_scan({1, 1, H, 1, 1, N, P, 0, {}, {}, {}},
                           {"initial_ssm", "initial_k", "initial_v"}, 71);
  const Stepped ours = step_on_guards(s, "auto"), truth = step_on_guards(s, "reference");
  r.ours("elements beside the tensors written",
         static_cast<double>(r.fix_disabled() ? lost : ours.lost), 0);
  if (r.fix_disabled()) return;
  const Values whole = run_scan(s, "reference").t;
  r.ours("out of the step is that of a scan of one token", off(ours.t, whole, "out"), 2e-6);
  for (const char* name : {"out", "ssm", "k", "v"})
    r.ours(std::string(name) + " of a step with 48 columns", off(ours.t, truth.t, name), 2e-6);
}

}  // namespace

extern const Reproducer mamba3_step_tail{"mamba3_step_tail", "M3-12",
                                         "a step that writes beyond a head's columns", run_all};

}  // namespace talea::repro
