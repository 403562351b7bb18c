// What: see rank_model.hpp.
// Why: rings within a node, one exchange between nodes: what NCCL does with large messages.
// Never: hides a term: what is not overlapped is added.
#include "ops/linear_cross_entropy/rank_model.hpp"

#include <algorithm>
#include <cmath>

#include "algebra/row_state.hpp"
#include "core/fail.hpp"

namespace talea::lce {
namespace {

struct Cost {
  double link_bytes = 0, node_bytes = 0, seconds = 0;
  Cost& operator+=(const Cost& o) {
    link_bytes += o.link_bytes;
    node_bytes += o.node_bytes;
    seconds += o.seconds;
    return *this;
  }
};

struct Net {
  const RankRates& rates;
  double each, nodes;  // ranks of a node, nodes

  Cost cost(double link_bytes, double node_bytes) const {
    Cost c{link_bytes, node_bytes,
           link_bytes / rates.link_bytes_per_s + node_bytes / rates.node_bytes_per_s};
    if (each > 1) c.seconds += rates.link_latency_s;
    if (nodes > 1) c.seconds += std::ceil(std::log2(nodes)) * rates.node_latency_s;
    return c;
  }
  // `bytes` of every rank to every rank: between the nodes first, then all of it in the node.
  Cost all_gather(double bytes) const {
    return cost((each - 1) * nodes * bytes, (nodes - 1) * bytes);
  }
  // `bytes` on every rank, each left with its share of the sum.
  Cost reduce_scatter(double bytes) const {
    return cost((each - 1) / each * bytes, (nodes - 1) / nodes * bytes / each);
  }
  Cost all_reduce(double bytes) const {
    Cost c = reduce_scatter(bytes);
    c += all_gather(bytes / (each * nodes));
    // One collective, not two: its start is paid once.
    if (each > 1) c.seconds -= rates.link_latency_s;
    return c;
  }
};

}  // namespace

RankPrediction predict(const RankShape& s, const RankRates& rates) {
  require(s.ranks >= 1, ErrorKind::usage, "ranks = {}: must be >= 1", s.ranks);
  require(s.nodes >= 1 && s.ranks % s.nodes == 0, ErrorKind::usage,
          "nodes = {}: {} ranks do not divide among them", s.nodes, s.ranks);
  const Net net{rates, static_cast<double>(s.ranks / s.nodes), static_cast<double>(s.nodes)};
  const auto n = static_cast<double>(s.tokens), d = static_cast<double>(s.hidden);
  RankPrediction p;
  p.vocab_rows = (s.vocab + s.ranks - 1) / s.ranks;
  p.weight_bytes = p.vocab_rows * s.hidden * s.element_bytes;
  p.dw_bytes = s.backward ? p.vocab_rows * s.hidden * s.dw_bytes : 0;
  const int64_t own_tokens = s.sequence_parallel ? s.tokens / s.ranks : s.tokens;
  p.hidden_bytes = own_tokens * s.hidden * s.element_bytes;
  p.dx_bytes = s.backward ? p.hidden_bytes : 0;
  // The logits of a chunk in fp32 fill the limit; under sequence parallelism all tokens' hidden
  // rows and their fp32 gradient come on top.
  const int64_t row_bytes = std::max<int64_t>(1, p.vocab_rows * 4);
  const int64_t rows =
      std::clamp(s.workspace_limit_bytes / row_bytes, int64_t{1}, std::max<int64_t>(1, s.tokens));
  p.chunks = s.tokens > 0 ? (s.tokens + rows - 1) / rows : 0;
  p.workspace_bytes = std::min(s.workspace_limit_bytes, s.tokens * row_bytes);
  if (s.sequence_parallel && s.ranks > 1)
    p.workspace_bytes += s.tokens * s.hidden * (s.element_bytes + (s.backward ? 4 : 0));
  p.memory_bytes = p.weight_bytes + p.dw_bytes + p.hidden_bytes + p.dx_bytes + p.workspace_bytes;
  p.flops = (s.backward ? 6.0 : 2.0) * n * d * static_cast<double>(p.vocab_rows);
  p.products_s = p.flops / rates.product_flops_per_s;
  const double whole_s =
      (s.backward ? 6.0 : 2.0) * n * d * static_cast<double>(s.vocab) / rates.product_flops_per_s;
  p.seconds = p.products_s;
  if (s.ranks > 1 && p.chunks > 0) {
    const auto chunks = static_cast<double>(p.chunks);
    Cost states, dx, hidden;
    for (int64_t i = 0; i < p.chunks; ++i)
      states += net.all_gather(n / chunks * static_cast<double>(sizeof(RowState<double>)));
    if (s.sequence_parallel) hidden = net.all_gather(static_cast<double>(p.hidden_bytes));
    if (s.backward && s.sequence_parallel)
      dx = net.reduce_scatter(n * d * 4);
    else if (s.backward)
      for (int64_t i = 0; i < p.chunks; ++i) dx += net.all_reduce(n / chunks * d * 4);
    p.states_bytes = states.link_bytes;
    p.dx_wire_bytes = dx.link_bytes;
    p.hidden_wire_bytes = hidden.link_bytes;
    p.node_bytes = states.node_bytes + dx.node_bytes + hidden.node_bytes;
    p.states_s = states.seconds;
    p.dx_s = dx.seconds;
    p.hidden_s = hidden.seconds;
    // dX may travel while dW, a third of the products, is multiplied; under sequence parallelism
    // all of it waits for the last chunk's.
    const double behind =
        s.dx_beside_dw ? p.products_s / 3 / (s.sequence_parallel ? chunks : 1) : 0;
    p.dx_exposed_s = std::max(0.0, p.dx_s - behind);
    p.seconds += p.states_s + p.hidden_s + p.dx_exposed_s;
  }
  p.efficiency = p.seconds > 0 ? whole_s / (static_cast<double>(s.ranks) * p.seconds) : 1;
  return p;
}

}  // namespace talea::lce
