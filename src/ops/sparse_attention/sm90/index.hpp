// What: the selection of lane sm90: scores of a chunk of queries, then its best keys.
// Why: apart from the attention's passes, with which it shares no kernel.
// Never: declines: index_config.hpp does.
#pragma once

#include "ops/sparse_attention/lane.hpp"
#include "ops/sparse_attention/sm90/index_config.hpp"

namespace talea::sparse_attention::sm90 {

Planned plan_index(const Problem& p, const DeviceFacts& d);
std::vector<std::string> index_details(const IndexConfig& config);
void run_index(const Call& c, const IndexConfig& config);

}  // namespace talea::sparse_attention::sm90
