// What: what lane sm90 does not take, and why.
// Why: a call that names the lane is refused with the reason; others go elsewhere.
// Never: reads a tensor.
#include <tuple>

#include "core/fail.hpp"
#include "ops/mamba3/sm90/config.hpp"
#include "ops/mamba3/sm90/facts.hpp"

namespace talea::mamba3::sm90 {
namespace {

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

// Whether states are handed to or by a pass that saves or goes back; over tokens they always are.
bool trains_with_states(const Problem& p) {
  const bool trains = p.backward() || p.out.saved;
  return trains && (p.sequence_world > 1 || any_of(p.in.initial_states) ||
                    any_of(p.out.final_states) || hands(p));
}

// Its kernel takes any row that a lane with limits takes.
std::optional<std::string> declined_step(const Problem& p) {
  if (p.state_dim > 256 || p.head_dim > 256)
    return fmt::format("N = {}, P = {}: at most 256", p.state_dim, p.head_dim);
  if (p.rank > 8) return fmt::format("R = {}: at most 8", p.rank);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> declined(const Problem& p, const DeviceFacts&) {
  if (p.dtype != DType::bf16) return fmt::format("{} q: bf16 alone", name_of(p.dtype));
  if (p.pass == Pass::step) return declined_step(p);
  if (p.state_dim != columns / 2 && p.state_dim != columns && p.state_dim != 2 * columns)
    return fmt::format("N = {}: {}, {} and {} alone", p.state_dim, columns / 2, columns,
                       2 * columns);
  if (p.head_dim != values && p.head_dim != 2 * values)
    return fmt::format("P = {}: {} and {} alone", p.head_dim, values, 2 * values);
  if (p.rank != 1 && p.rank != 2 && p.rank != 4 && p.rank != 8)
    return fmt::format("R = {}: 1, 2, 4 and 8 alone", p.rank);
  if (p.pairs % 2 != 0) return fmt::format("A = {}: even numbers alone", p.pairs);
  if (p.options.chunk > 0 && p.options.chunk * p.rank != rows)
    return fmt::format("chunk = {} tokens of rank {}: {} rows alone", p.options.chunk, p.rank,
                       rows);
  // Each half of N rounds its own weight of a pair: with few pairs that shows.
  if (p.state_dim == 2 * columns && p.batch * p.tokens * p.rank <= rows)
    return fmt::format("N = {}: more than {} rows alone", p.state_dim, rows);
  if (trains_with_states(p) && (p.state_dim != columns || p.head_dim != values || p.rank > 4))
    return fmt::format("states in training: N = {}, P = {} and R of 1, 2 and 4 alone", columns,
                       values);
  if (p.options.head_norm) return "head_norm";
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
  if (p.tokens >= int64_t{1} << 31 || p.sequences * p.heads * units_of(p) >= int64_t{1} << 31)
    return "2^31 tokens, or heads of sequences";
  return std::nullopt;
}

}  // namespace talea::mamba3::sm90
