// What: one call of the scan on a lane, with its tensors where that lane reads them.
// Why: the same suite serves host lanes, the device's, and the device's text run on a host.
// Never: judges, or changes what a call says.
#include "ops/mamba3/errand.hpp"

#include "core/arena.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"
#ifdef TALEA_WITH_CUDA
#include "ops/mamba3/host_machine.hpp"
#include "ops/mamba3/saved.hpp"
#endif

namespace talea::yardsticks::mamba3 {

using talea::mamba3::Inputs;
using talea::mamba3::Options;
using talea::mamba3::Outputs;
using talea::mamba3::Pass;
using talea::mamba3::Problem;
using talea::mamba3::Result;

namespace {

bool is_device(const std::string& lane) {
  for (const auto& l : talea::mamba3::Operator::lanes())
    if (l.name == lane) return l.runs_on == DeviceKind::cuda;
  return false;
}

#ifdef TALEA_WITH_CUDA
DeviceFacts some_device() {
  DeviceFacts d;
  d.sm = 90;
  d.sm_count = 132;
  d.shared_bytes = 227 << 10;
  return d;
}
#endif

}  // namespace

namespace {

std::vector<std::string> lanes_on(DeviceKind kind) {
  std::vector<std::string> names;
  for (const auto& l : talea::mamba3::Operator::lanes())
    if (l.runs_on == kind && std::string(l.kind) != "not built" &&
        std::string(l.kind) != "unfused comparison")
      names.push_back(l.name);
  return names;
}

}  // namespace

std::vector<std::string> host_lanes() { return lanes_on(DeviceKind::cpu); }

#ifdef TALEA_WITH_CUDA
namespace {

bool takes_any_size(const std::string& name) {
  Problem p;
  p.device = DeviceKind::cuda;
  p.batch = p.tokens = p.heads = p.groups = p.sequences = 1;
  p.state_dim = p.head_dim = 8;
  DeviceFacts d = some_device();
  d.cuda_devices = 1;
  for (const auto& l : talea::mamba3::Operator::lanes())
    if (l.name == name) return !l.decline(p, d);
  return false;
}

}  // namespace

std::vector<std::string> lanes_of_sizes() {
  std::vector<std::string> names = lanes_on(DeviceKind::cuda);
  std::erase_if(names, takes_any_size);
  return names;
}
#else
std::vector<std::string> lanes_of_sizes() { return {}; }
#endif

std::vector<std::string> tested_lanes() {
  std::vector<std::string> names = host_lanes();
#ifdef TALEA_WITH_CUDA
  names.push_back(device_text);
  for (const std::string& name : lanes_on(DeviceKind::cuda))
    if (takes_any_size(name)) names.push_back(name);
#endif
  return names;
}

bool counts_on_device(const std::string& lane) { return lane == device_text || is_device(lane); }

testing::Place* place_of(const std::string& lane) {
  if (!is_device(lane)) return nullptr;
  std::string why;
  testing::Place* place = testing::cuda_place(why);
  if (!place) throw Error(ErrorKind::unavailable, why);
  return place;
}

std::string missing(const std::string& lane) {
  std::string why;
  if (is_device(lane)) testing::cuda_place(why);
  return why;
}

Errand::Errand(std::string lane, Pass pass, const Inputs& in, const Outputs& out,
               const Options& options, const talea::mamba3::Ranks& ranks)
    : lane_(std::move(lane)), pass_(pass), in_(in), out_(out), options_(options), ranks_(ranks) {
  options_.lane = lane_ == device_text ? "auto" : lane_;
  place_ = place_of(lane_);
}

Errand::Errand(std::string lane, const talea::mamba3::StepArguments& step, const Options& options)
    : lane_(std::move(lane)), stepping_(true), pass_(Pass::step), step_(step), options_(options) {
  options_.lane = lane_ == device_text ? "auto" : lane_;
  place_ = place_of(lane_);
}

Errand::~Errand() {
  if (place_) place_->reset();
}

void Errand::bring(std::vector<std::byte>& block) {
  if (!place_) return;
  const auto bytes = static_cast<int64_t>(block.size());
  Mirrored m = {block.data(), static_cast<std::byte*>(place_->allocate(bytes)), bytes};
  place_->upload(m.there, m.here, bytes);
  blocks_.push_back(m);
}

void* Errand::there(void* data) const {
  auto* at = static_cast<std::byte*>(data);
  for (const Mirrored& m : blocks_)
    if (at >= m.here && at <= m.here + m.bytes) return m.there + (at - m.here);
  return data;
}

namespace {

// f(tensor) of all of a call.
template <typename F>
void each_tensor(Inputs& in, Outputs& out, F f) {
  talea::mamba3::for_inputs(in, [&](const char*, Tensor& t) { f(t); });
  talea::mamba3::for_outputs(out, [&](const char*, Tensor& t) { f(t); });
}
template <typename F>
void each_tensor(talea::mamba3::StepArguments& a, F f) {
  talea::mamba3::for_inputs(a.in, [&](const char*, Tensor& t) { f(t); });
  for (Tensor* t :
       {&a.slots, &a.out, &a.status, &a.state.angle, &a.state.ssm, &a.state.k, &a.state.v})
    f(*t);
}

}  // namespace

Problem Errand::problem() const {
  auto in = in_;
  auto out = out_;
  auto step = step_;
  const auto move = [&](Tensor& t) {
    if (!t || !place_) return;
    t.data = there(t.data);
    t.device = place_->kind();
  };
  each_tensor(in, out, move);
  each_tensor(step, move);
  return stepping_ ? describe(step, options_) : describe(pass_, in, out, options_, ranks_);
}

#ifdef TALEA_WITH_CUDA
namespace scan = talea::mamba3;
namespace text = talea::mamba3::cuda;

int64_t Errand::workspace_bytes() const {
  const Problem p = problem();
  if (lane_ != device_text) return talea::mamba3::workspace_bytes(p);
  return text::workspace_of(p, text::make_plan(p, some_device()));
}

int64_t Errand::saved_bytes() const {
  const Problem p = problem();
  if (lane_ != device_text) return talea::mamba3::saved_bytes(p);
  return scan::saved_mark_bytes + text::saved_of(p, text::make_plan(p, some_device()));
}

Result Errand::run_text(const Problem& p, Workspace workspace) const {
  const text::Plan plan = text::make_plan(p, some_device());
  const Inputs in = stepping_ ? step_inputs(step_) : in_;
  const Outputs out = stepping_ ? step_outputs(step_) : out_;
  scan::FullAxes full = scan::full_axes(p, in, out);
  Planned planned;
  planned.kept_bytes = text::saved_of(p, plan);
  Result result;
  take_saved(p, device_text, planned, full, result);
  const DeviceFacts facts = some_device();
  const scan::Call call = {p,         facts,  full.in, full.out, step_.slots,
                           workspace, ranks_, nullptr, result};
  Arena arena(workspace);
  const text::Buffers buffers = text::lay_out(arena, p, plan);
  text::HostMachine<float, text::Wide, 0> wide(plan, buffers);
  text::HostMachine<float, text::Tf32, 0> tf32(plan, buffers);
  text::HostMachine<text::Bf16, text::Wide, 0> narrow(plan, buffers);
  text::HostMachine<text::Bf16, text::Wide, text::kept_tiles> kept(plan, buffers);
  text::Machine* const machines[] = {&wide, &tf32, &narrow};
  run_pass(
      plan.keeps ? static_cast<text::Machine&>(kept) : *machines[static_cast<int>(plan.engine)],
      call, plan, buffers);
  result.chunk_tokens = plan.chunk;
  return result;
}
#else
int64_t Errand::workspace_bytes() const { return talea::mamba3::workspace_bytes(problem()); }
int64_t Errand::saved_bytes() const { return talea::mamba3::saved_bytes(problem()); }
Result Errand::run_text(const Problem&, Workspace) const { return {}; }
#endif

Result Errand::run(Workspace workspace) {
  const Problem p = problem();
  if (lane_ == device_text) {
    Result r = run_text(p, workspace);
    ++calls_made;
    return r;
  }
  const auto move = [&](Tensor& t) {
    if (!t || !place_) return;
    t.data = there(t.data);
    t.device = place_->kind();
  };
  each_tensor(in_, out_, move);
  each_tensor(step_, move);
  workspace.data = there(workspace.data);
  const Stream stream = place_ ? place_->stream() : nullptr;
  const auto call = pass_ == Pass::backward ? talea::mamba3::backward : talea::mamba3::forward;
  const Result r = stepping_ ? step(step_, options_, workspace, stream)
                             : call(in_, out_, options_, workspace, ranks_, stream);
  for (const Mirrored& m : blocks_) place_->download(m.here, m.there, m.bytes);
  ++calls_made;
  return r;
}

}  // namespace talea::yardsticks::mamba3
