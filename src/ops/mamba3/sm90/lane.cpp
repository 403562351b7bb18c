// What: the table entry of lane sm90: chunks of a head by warpgroups, the state in registers.
// Why: the sizes that models are trained at, in bf16, on Hopper.
// Never: declines in silence, or holds more than the workspace limit.
#include "ops/mamba3/rows/lane.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/rows/step.hpp"
#include "ops/mamba3/sm90/config.hpp"
#include "ops/mamba3/sm90/handed.cuh"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3 {
namespace {

class HopperMachine final : public cuda::DeviceMachine {
 public:
  using DeviceMachine::DeviceMachine;
  void forward(const cuda::Args& a) override {
    if (a.size.step) return cuda::launch_step(a, at_.stream);
    cuda::Wave w;
    if (a.pack.rounds && at_.plan.ahead > 0)
      return sm90::launch_forward_pack(a, cut(), at_.buffers.units, at_.stream);
    for (; w.first < a.size.sequences; w.first = w.last) {
      w.last = std::min(w.first + at_.plan.wave, a.size.sequences);
      if (at_.plan.ahead == 0)
        sm90::launch_forward_siso(a, w, at_.buffers.units, at_.stream);
      else
        sm90::launch_forward(a, cut(), w, at_.buffers.units, at_.plan.ahead, at_.stream);
    }
  }
  void begin_units(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_begin(a, cut(), w, at_.buffers.units, at_.stream);
  }
  void segment_states(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_segment(a, cut(), w, of_segment(a, w), at_.stream);
  }
  void slice_back(const cuda::Args& a, const cuda::Wave& w) override {
    cuda::UnitBuffers b = of_segment(a, w);
    sm90::launch_upstream(a, cut(), w, b, at_.stream);
    sum_last_rows(a, w, true);
    if (mutant(ScanMutant::m3_gradients_of_the_place_before)) {
      cuda::Wave behind = w;
      ++behind.segment;
      b = of_segment(a, behind);
    }
    if (sm90::wants_rows(a)) {
      sm90::launch_without_heads(a, cut(), w, b, at_.stream);
      if (sm90::gradients_ahead(cut(), a.size.rank, a.size.pairs))
        sm90::launch_gradients(a, cut(), w, b, at_.stream);
      else
        sm90::launch_back(a, cut(), w, b, at_.stream);
    }
    sm90::launch_before(a, w, b, at_.stream);
  }
  // Not before the chains of the slice that comes next are under way: they leave room beside them.
  void sum_rows(const cuda::Args& a, const cuda::Wave& w) override {
    if (sm90::wants_rows(a)) last_rows_ = w;
  }
  void add_parameters(const cuda::Args& a, const cuda::Wave& w) override {
    sum_last_rows(a, w, false);
    sm90::launch_edges(a, cut(), w, at_.buffers.units, at_.stream);
    DeviceMachine::add_parameters(a, w);
  }
  void store_parameters(const cuda::Args& a) override {
    if (cut().whole) return DeviceMachine::store_parameters(a);
    sm90::launch_store_parameters(a, cut(), at_.buffers.totals, at_.stream);
  }
  void clear_padding(const cuda::Args& a) override {
    if (cut().whole) return DeviceMachine::clear_padding(a);
    cuda::Args heads = a;  // not their units
    heads.size.heads = cut().heads_of(a.size);
    heads.size.values <<= cut().slab_bits;
    heads.size.columns = cut().columns;
    heads.size.pairs = cut().pairs;
    DeviceMachine::clear_padding(heads);
  }

 private:
  const cuda::Cut& cut() const { return at_.buffers.cut; }
  cuda::UnitBuffers of_segment(const cuda::Args& a, const cuda::Wave& w) const {
    return sm90::buffers_of_segment(a, cut(), w, at_.buffers.units);
  }
  // beside: those of the slice at work, w.
  void sum_last_rows(const cuda::Args& a, const cuda::Wave& w, bool beside) {
    if (last_rows_ && mutant(ScanMutant::m3_sums_of_the_next_slice)) last_rows_ = w;
    if (last_rows_)
      sm90::launch_sums(a, cut(), *last_rows_, at_.buffers.units, at_.buffers.totals, beside,
                        at_.stream);
    last_rows_.reset();
  }
  std::optional<cuda::Wave> last_rows_;  // of which rows are not yet summed
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d) {
  if (auto why = cuda::declined_place(p, d)) return why;
  if (d.sm != 90) return fmt::format("sm_{}: needs sm_90", d.sm);
  return sm90::declined(p, d);
}

Planned plan(const Problem& p, const DeviceFacts& d) {
  return cuda::planned_bytes(p, sm90::make_plan(p, d));
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  if (p.pass == Pass::step) return cuda::step_details();
  const auto& made = alone<cuda::Plan>(planned);
  std::vector<std::string> said = {
      "operands = bf16", fmt::format("chunk = {} tokens, {} rows", made.chunk, made.chunk * p.rank),
      "state = registers"};
  cuda::append_backward(said, p, made);
  if (p.backward()) said.push_back(fmt::format("heads of a group in {} parts", made.parts));
  if (made.stretch > 0)
    said.push_back(
        fmt::format("stretches of {} chunks, {} side by side", made.stretch, made.abreast));
  const cuda::Cut cut = cuda::cut_of(p, made);
  if (cut.bits() > 0)
    said.push_back(
        fmt::format("head = {} units of N {}, P {}", 1 << cut.bits(), made.columns, made.values));
  return said;
}

void run(const Call& c, const Planned& planned) {
  const auto& made = planned.as<cuda::Plan>();
  cuda::run_passes<HopperMachine>(c, made);
  cuda::record(c, made, "registers", "fp32 within a chunk, fp64 across chunks and sequences");
}

}  // namespace

Lane sm90_lane() {
  return over_ranks<plan, run>({.name = "sm90",
                                .kind = "native kernel",
                                .runs_on = DeviceKind::cuda,
                                .decline = decline,
                                .details = details});
}

}  // namespace talea::mamba3
