// What: lane reference: the recurrence in fp64, any shape, type and stride.
// Why: the truth that other lanes of this library are compared with.
// Never: fast; never a chunk, never a rounding but the one at each output.
#include <algorithm>

#include "core/fail.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/host_outputs.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/reference/head.hpp"

namespace talea::mamba3 {
namespace {

using reference::Head;
using reference::Memory;

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.options.chunk > 0)
    return fmt::format("chunk = {}: the recurrence has no chunks", p.options.chunk);
  return std::nullopt;
}

struct Config {};

Planned plan(const Problem& p, const DeviceFacts&) {
  Arena arena;
  Memory memory(arena, p);
  return planned(arena.bytes(), 0.0, Config{});
}

// What one group of one sequence leaves: the sums over its heads, rounded once.
void store_group(const Call& c, const Memory& m, const Sequence& s, int64_t g) {
  const int64_t N = c.problem.state_dim, R = c.problem.rank;
  for (int64_t t = 0; t < s.tokens(); ++t)
    for (int64_t r = 0; r < R; ++r)
      for (int64_t n = 0; n < N; ++n) {
        const int64_t at = (t * R + r) * N + n;
        if (c.out.d.q) set(c.out.d.q, m.sum_q[at], s.batch, s.begin + t, r, g, n);
        if (c.out.d.k) set(c.out.d.k, m.sum_k[at], s.batch, s.begin + t, r, g, n);
      }
}

void backward_of(const Call& c, Memory& m, const Sequence& s) {
  const Problem& p = c.problem;
  const int64_t rows = s.tokens() * p.rank * p.state_dim;
  std::fill_n(m.sum_angle, s.tokens() * p.pairs, 0.0);
  for (int64_t g = 0; g < p.groups; ++g) {
    std::fill_n(m.sum_q, rows, 0.0);
    std::fill_n(m.sum_k, rows, 0.0);
    for (int64_t h = 0; h < p.heads; ++h)
      if (p.group_of(h) == g) Head(c, m, s, h).backward();
    store_group(c, m, s, g);
  }
  if (!c.out.d.angles || !p.sum_angles) return;
  for (int64_t t = 0; t < s.tokens(); ++t)
    for (int64_t i = 0; i < p.pairs; ++i)
      set(c.out.d.angles, m.sum_angle[t * p.pairs + i], s.batch, s.begin + t, 0, i);
}

void run(const Call& c, const Planned&) {
  const Problem& p = c.problem;
  Arena arena(c.workspace);
  Memory m(arena, p);
  read_sequences(c, m.ends);
  clear_padding(c, m.ends);
  if (p.backward()) std::fill_n(m.parameters, p.heads * parameter_count(p), 0.0);
  for (int64_t n = 0; n < p.sequences; ++n) {
    const Sequence s = sequence_of(p, m.ends, n);
    if (s.row < 0) continue;
    if (p.backward()) {
      backward_of(c, m, s);
    } else {
      for (int64_t h = 0; h < p.heads; ++h) Head(c, m, s, h).forward();
    }
  }
  if (p.backward()) store_parameters(c, m.parameters);
  Result& r = c.result;
  r.state_home = "workspace";
  r.state_dtype = "fp64";
  r.accumulator_angle = "64-bit integers of 2^-64 turn";
  r.accumulator_decay = "fp64, a step at a time";
  r.accumulator_state = r.accumulator_state_gradient = r.accumulator_rows = "fp64";
  r.accumulator_parameters = r.accumulator_groups = "fp64";
  r.shared_product = "none: a step at a time";
  if (p.backward()) r.notes.push_back("states of a segment computed anew from its checkpoint");
}

}  // namespace

Lane reference_lane() {
  return over_ranks<plan, run>({
      .name = "reference",
      .kind = "reference",
      .decline = decline,
      .details =
          [](const Problem&, const Planned&) {
            return std::vector<std::string>{"arithmetic = fp64", "chunk = none: token by token"};
          },
  });
}

}  // namespace talea::mamba3
