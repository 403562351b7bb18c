// What: the times of one shape over NCCL ranks: variants side by side, their errors, their parts.
// Why: the split into products and exchanges says what a missed efficiency is made of.
// Never: compares with a number of another run.
#pragma once

#include "bench/nccl/world.hpp"
#include "core/receipt.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"

namespace talea::bench {

// How the ranks of one subject sum dX. kind: beside, bf16 (beside, in bf16), once, silent.
struct Variant {
  std::string kind;
  int multiprocessors;  // see NcclOptions::multiprocessors_beside
};
std::vector<Variant> parse_variants(const std::string& text);  // "beside:8,once:0"

// The receipt's section; appends the calls.
nlohmann::json measure_speed(World& world, DeviceSession& device, const Size& size,
                             const std::vector<Variant>& variants,
                             std::vector<lce::CallFacts>& calls);

}  // namespace talea::bench
