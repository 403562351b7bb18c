// What: lane unfused: the chunk form as eager tensor code has it, by name only.
// Why: the yardstick of accuracy and memory that a fused lane is held against.
// Never: chosen by `auto`.
#include <algorithm>

#include "core/fail.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/unfused/head.hpp"

namespace talea::mamba3 {
namespace {

using unfused::Head;
using unfused::Memory;

std::optional<std::string> decline(const Problem& p, const DeviceFacts&) {
  if (p.device != DeviceKind::cpu)
    return "reads host memory only; the tensors are on a CUDA device";
  if (p.dtype == DType::f64) return "fp64 q: this lane multiplies in fp32";
  return std::nullopt;
}

struct Config {
  int64_t chunk = 0;
};

Planned plan(const Problem& p, const DeviceFacts&) {
  Arena arena;
  const Memory memory(arena, p);
  return planned(arena.bytes(), useful_flops(p, memory.chunk) * (p.backward() ? 4.0 / 3 : 1),
                 Config{memory.chunk});
}

void store_group(const Call& c, const Memory& m, const Sequence& s, int64_t g) {
  const int64_t N = c.problem.state_dim, R = c.problem.rank;
  for (int64_t t = 0; t < s.tokens(); ++t)
    for (int64_t i = 0; i < R * N; ++i) {
      if (c.out.d.q) set(c.out.d.q, m.sum_q[t * R * N + i], s.batch, s.begin + t, i / N, g, i % N);
      if (c.out.d.k) set(c.out.d.k, m.sum_k[t * R * N + i], s.batch, s.begin + t, i / N, g, i % N);
    }
}

void run_sequence(const Call& c, Memory& m, const Sequence& s) {
  const Problem& p = c.problem;
  std::fill_n(m.sum_angle, s.tokens() * p.pairs, 0.0f);
  for (int64_t g = 0; g < p.groups; ++g) {
    std::fill_n(m.sum_q, s.tokens() * p.rank * p.state_dim, 0.0f);
    std::fill_n(m.sum_k, s.tokens() * p.rank * p.state_dim, 0.0f);
    for (int64_t h = 0; h < p.heads; ++h)
      if (p.group_of(h) == g) Head(c, m, s, h).run();
    if (p.backward()) store_group(c, m, s, g);
  }
  for (int64_t t = 0; c.out.d.angles && p.sum_angles && t < s.tokens(); ++t)
    for (int64_t i = 0; i < p.pairs; ++i)
      set(c.out.d.angles, m.sum_angle[t * p.pairs + i], s.batch, s.begin + t, 0, i);
}

void run(const Call& c, const Planned&) {
  const Problem& p = c.problem;
  Arena arena(c.workspace);
  Memory m(arena, p);
  read_sequences(c, m.ends);
  clear_padding(c, m.ends);
  std::fill_n(m.parameters, p.heads * parameter_count(p), 0.0);
  for (int64_t n = 0; n < p.sequences; ++n) {
    const Sequence s = sequence_of(p, m.ends, n);
    if (s.row >= 0) run_sequence(c, m, s);
  }
  if (p.backward()) store_parameters(c, m.parameters);
  Result& r = c.result;
  r.chunk_tokens = m.chunk;
  r.chunk_rows = m.chunk * p.rank;
  r.state_home = "workspace";
  r.state_dtype = std::string("fp32 carried, ") + name_of(p.dtype) + " multiplied";
  r.accumulator_angle = "fp32, reduced at each step";
  r.accumulator_decay = "fp32 prefix sums of a chunk";
  r.accumulator_state = r.accumulator_state_gradient = "fp32";
  r.accumulator_rows = std::string("fp32 within a product, ") + name_of(p.dtype) + " between";
  r.accumulator_parameters = "fp64";
  r.accumulator_groups = "fp32";
  r.shared_product = "dO V^T once a chunk, used by dq, dk and the decays";
  r.per_head_bytes = p.tokens * p.rank * p.state_dim * size_of(p.dtype) * (p.backward() ? 4 : 2);
}

}  // namespace

Lane unfused_lane() {
  return over_ranks<plan, run>({
      .name = "unfused",
      .kind = "unfused comparison",
      .reach = Reach::by_name,
      .by_name_why = "materialises every intermediate; only when asked for by name",
      .decline = decline,
      .details =
          [](const Problem& p, const Planned& planned) {
            return std::vector<std::string>{
                fmt::format("chunk = {} tokens", alone<Config>(planned).chunk),
                fmt::format("intermediates = {}", name_of(p.dtype))};
          },
  });
}

}  // namespace talea::mamba3
