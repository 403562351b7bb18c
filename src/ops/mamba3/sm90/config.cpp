// What: what lane sm90 takes, and how it cuts it: chunk, segments, slices, sequences side by side.
// Why: a pure function of problem and device, tested without a GPU.
// Never: reads a tensor, or lets a limit change a bit of a result.
#include "ops/mamba3/sm90/config.hpp"

#include <algorithm>
#include <cmath>

#include "core/fail.hpp"

namespace talea::mamba3::sm90 {
namespace {

constexpr int64_t rows = 64, columns = 128, values = 64;
constexpr int64_t usual_bytes = int64_t{160} << 20;  // a wave of several sequences stays within
constexpr int64_t usual_limit = int64_t{256} << 20;
constexpr int64_t forward_bytes = int64_t{48}
                                  << 20;             // what forward writes ahead stays in the cache
constexpr int64_t most_ahead = 32, usual_ahead = 8;  // chunks
constexpr int64_t usual_slice = 8;   // chunks side by side are not fewer but for the limit
constexpr int64_t processors = 132;  // of the chips that the lane is for

// Why rows of `t` are not read in pieces of `bytes`; empty: they are.
std::string not_in_pieces(const char* name, const Tensor& t, int64_t bytes) {
  if (!t) return "";
  const int64_t pieces = bytes / size_of(t.dtype);
  const auto stride = [&](int i) { return t.stride[static_cast<size_t>(i)]; };
  if (t.shape[static_cast<size_t>(t.rank - 1)] > 1 && stride(t.rank - 1) != 1)
    return fmt::format("{}: last stride {}, must be 1", name, stride(t.rank - 1));
  for (int i = 0; i + 1 < t.rank; ++i)
    if (t.shape[static_cast<size_t>(i)] > 1 && stride(i) % pieces != 0)
      return fmt::format("{}: stride {} of axis {}, must be a multiple of {}", name, stride(i), i,
                         pieces);
  return "";
}

bool any_of(const States& s) { return s.angle || s.ssm || s.k || s.v; }

// Forward takes states and hands them on; not where backward is to follow from what it saves.
std::string states_declined(const Problem& p) {
  if (p.out.saved && any_of(p.in.initial_states)) return "initial states of a pass that saves";
  if (p.out.saved && any_of(p.out.final_states)) return "final states of a pass that saves";
  if (!p.backward()) return "";
  if (any_of(p.in.initial_states)) return "initial states of backward";
  if (any_of(p.in.d_final_states)) return "gradients of final states";
  if (any_of(p.out.d.initial_states)) return "gradients of initial states";
  return "";
}

// Its kernel takes any row that a lane with limits takes.
std::optional<std::string> declined_step(const Problem& p) {
  if (p.state_dim > 256 || p.head_dim > 256)
    return fmt::format("N = {}, P = {}: at most 256", p.state_dim, p.head_dim);
  if (p.rank > 8) return fmt::format("R = {}: at most 8", p.rank);
  return std::nullopt;
}

// As many sequences side by side as memory is for, since many blocks wait less for the last one;
// then as many chunks of a segment.
void fit(const Problem& p, int64_t limit, cuda::Plan& plan) {
  const int64_t most = std::min(limit, usual_bytes), n = std::max<int64_t>(p.sequences, 1);
  plan.slice = plan.segment;
  plan.wave = 1;
  const int64_t one = cuda::workspace_of(p, plan);
  plan.wave = std::min<int64_t>(n, 2);
  const int64_t each = std::max<int64_t>(cuda::workspace_of(p, plan) - one, 1);
  plan.wave = std::clamp<int64_t>((most - one) / each + 2, 1, n);  // but for what is rounded up
  while (plan.wave > 1 && cuda::workspace_of(p, plan) > most) --plan.wave;
  const int64_t waves = (n + plan.wave - 1) / plan.wave;
  plan.wave = (n + waves - 1) / waves;
  const auto shorten = [&](int64_t least, int64_t bytes) {
    while (plan.slice > least && cuda::workspace_of(p, plan) > bytes)
      plan.slice = (plan.slice + 1) / 2;
  };
  shorten(usual_slice, most);
  shorten(1, limit);
}

// Forward forms the tokens of some chunks ahead of each launch: as many as the cache holds, of as
// many sequences as then fit. Not for one row a token (SISO), as long as every multiprocessor has
// heads: its turns are as many numbers as the rows that they turn.
void fit_forward(const Problem& p, int64_t limit, cuda::Plan& plan) {
  const int64_t most = std::min(limit, forward_bytes), n = std::max<int64_t>(p.sequences, 1);
  plan.wave = n, plan.ahead = std::clamp<int64_t>(plan.chunks, 1, most_ahead);
  const auto is_large = [&] { return cuda::workspace_of(p, plan) > most; };
  const int64_t least = std::min<int64_t>(plan.ahead, usual_ahead);
  while (plan.ahead > least && is_large()) plan.ahead = (plan.ahead + 1) / 2;
  while (plan.wave > 1 && is_large()) plan.wave = (plan.wave + 1) / 2;
  while (plan.ahead > 1 && cuda::workspace_of(p, plan) > limit) plan.ahead /= 2;
}

// How long the gradients take, in heads of one multiprocessor: a block costs about one beside its
// own, and a round of blocks is as long as one.
int64_t time_of(const Problem& p, const cuda::Plan& plan) {
  const auto pieces = [](int64_t of, int64_t by) { return (of + by - 1) / by; };
  const int64_t heads = pieces(p.heads_per_group, plan.parts);
  const int64_t blocks = plan.wave * plan.slice * p.groups * plan.parts;
  return pieces(std::max<int64_t>(p.sequences, 1), plan.wave) * plan.segments *
         pieces(plan.segment, plan.slice) * pieces(blocks, processors) * (heads + 1);
}

// The heads of a group in parts, a block each: the fewest parts of those that take least. Which
// head is summed where is of the problem alone: no limit, no device, and not what was saved.
int64_t parts_of(Problem p, cuda::Plan plan) {
  p.in.saved = {};
  const int64_t all = std::max<int64_t>(p.heads_per_group, 1);
  int64_t best = 1, least = 0;
  for (int64_t parts = 1; parts < 2 * all; parts *= 2) {
    const int64_t heads = std::max<int64_t>(all / parts, 1);
    plan.parts = (all + heads - 1) / heads;
    fit(p, usual_limit, plan);
    const int64_t time = time_of(p, plan);
    if (parts > 1 && (time >= least || cuda::workspace_of(p, plan) > usual_limit)) continue;
    best = plan.parts, least = time;
  }
  return best;
}

}  // namespace

std::optional<std::string> declined(const Problem& p, const DeviceFacts&) {
  if (p.dtype != DType::bf16) return fmt::format("{} q: bf16 alone", name_of(p.dtype));
  if (p.heads_world > 1 || p.sequence_world > 1)
    return "heads or tokens over several ranks are for host tensors";
  if (p.pass == Pass::step) return declined_step(p);
  if (p.state_dim != columns || p.head_dim != values)
    return fmt::format("N = {}, P = {}: {} and {} alone", p.state_dim, p.head_dim, columns, values);
  if (p.rank != 1 && p.rank != 2 && p.rank != 4)
    return fmt::format("R = {}: 1, 2 and 4 alone", p.rank);
  if (p.pairs % 2 != 0) return fmt::format("A = {}: even numbers alone", p.pairs);
  if (p.options.chunk > 0 && p.options.chunk * p.rank != rows)
    return fmt::format("chunk = {} tokens of rank {}: {} rows alone", p.options.chunk, p.rank,
                       rows);
  if (p.options.head_norm) return "head_norm";
  if (const std::string why = states_declined(p); !why.empty()) return why;
  if (!p.backward() && !p.out.out) return "no out";
  for (const auto& [name, tensor, bytes] :
       {std::tuple<const char*, const Tensor&, int64_t>{"q", p.in.q, 16},
        {"k", p.in.k, 16},
        {"v", p.in.v, 16},
        {"z", p.in.z, 16},
        {"out", p.out.out, 16},
        {"d_v", p.out.d.v, 16},
        {"d_z", p.out.d.z, 16}})
    if (std::string why = not_in_pieces(name, tensor, bytes); !why.empty()) return why;
  if (p.alignment_bytes < 16)
    return fmt::format("rows on {} bytes, must be on 16", p.alignment_bytes);
  if (p.tokens >= int64_t{1} << 31 || p.sequences * p.heads >= int64_t{1} << 31)
    return "2^31 tokens, or heads of sequences";
  return std::nullopt;
}

cuda::Plan make_plan(const Problem& p, const DeviceFacts&) {
  cuda::Plan plan;
  plan.engine = cuda::Engine::bf16;
  plan.keeps = true;
  plan.threads = 256;
  plan.chunk = rows / p.rank;
  plan.chunks = (p.tokens + plan.chunk - 1) / plan.chunk;
  plan.segment = std::max<int64_t>(
      1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(plan.chunks)))));
  plan.segments = (plan.chunks + plan.segment - 1) / plan.segment;
  plan.blocks = p.sequences * p.heads;
  for (cuda::ChunkPlaces* places : {&plan.forward, &plan.states, &plan.backward}) {
    places->rows = static_cast<int>(rows);
    places->padded_columns = static_cast<int>(columns);
    places->padded_values = static_cast<int>(values);
  }
  if (p.pass == Pass::step) return plan;
  if (!p.backward()) {
    const int64_t limit = p.options.workspace_limit_bytes;
    const bool constant = p.in.initial_states.angle && !p.in.angles;  // turns that no token adds to
    if (p.rank > 1 || constant || p.sequences * p.heads <= processors / 2) {
      fit_forward(p, limit, plan);
      return plan;
    }
    plan.hands = any_of(p.in.initial_states) || any_of(p.out.final_states);
    plan.wave = std::max<int64_t>(p.sequences, 1);
    while (plan.wave > 1 && cuda::workspace_of(p, plan) > limit) plan.wave = (plan.wave + 1) / 2;
    return plan;
  }
  plan.parts = parts_of(p, plan);
  fit(p, p.options.workspace_limit_bytes, plan);
  return plan;
}

}  // namespace talea::mamba3::sm90
