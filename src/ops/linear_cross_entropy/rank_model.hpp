// What: memory, flops, wire bytes and time of one call over many ranks, predicted from rates.
// Why: whether a shape should be spread over 8 or 512 ranks can be asked before they are rented.
// Never: measures or touches a device: a pure function of its arguments.
#pragma once

#include <cstdint>

namespace talea::lce {

// Rates of one rank. The defaults are rounded from the first runs on four H200s over NVLink;
// receipts/ranks has later ones, and tests/cli/test_plan.py predicts each from its own rates. The
// rates between nodes are assumed (one 400 Gbit/s port a GPU).
struct RankRates {
  double product_flops_per_s = 670e12;  // of a whole call on one rank: products and row passes
  double link_bytes_per_s = 290e9;      // of a ring in one node, each direction
  double link_latency_s = 230e-6;       // of one collective, its launch and the wait for the others
  double node_bytes_per_s = 45e9;       // of one GPU's share of the network
  double node_latency_s = 15e-6;        // of one step between nodes
};

struct RankShape {
  int64_t tokens = 0, hidden = 0, vocab = 0;
  int64_t element_bytes = 2;  // of hidden and weight
  int64_t dw_bytes = 4;       // of an element of dW
  bool backward = true;
  bool sequence_parallel = false;
  // The sum of dX runs beside the dW product; the few multiprocessors it takes are not counted.
  bool dx_beside_dw = false;
  int64_t workspace_limit_bytes = int64_t{256} << 20;
  int64_t ranks = 1, nodes = 1;
};

struct RankPrediction {
  // Of the rank that holds most.
  int64_t vocab_rows = 0, weight_bytes = 0, dw_bytes = 0, hidden_bytes = 0, dx_bytes = 0;
  int64_t workspace_bytes = 0, memory_bytes = 0;  // memory: all of them
  int64_t chunks = 0;
  double flops = 0;
  // Sent by one rank in the whole call: within its node, and between nodes.
  double states_bytes = 0, dx_wire_bytes = 0, hidden_wire_bytes = 0, node_bytes = 0;
  double products_s = 0, states_s = 0, dx_s = 0, dx_exposed_s = 0, hidden_s = 0;
  double seconds = 0;
  double efficiency = 0;  // of one rank's time over ranks x this
};

// Throws Error(usage) for ranks or nodes below 1, or ranks that do not divide among the nodes.
RankPrediction predict(const RankShape& shape, const RankRates& rates);

}  // namespace talea::lce
