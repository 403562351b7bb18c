// What: the outputs of one call on the host, and how far those of two calls lie apart.
// Why: every variant that is timed is also compared.
// Never: used outside bench/nccl.
#pragma once

#include "bench/nccl/world.hpp"

namespace talea::bench {

struct Outcome {
  double loss = 0;
  std::vector<uint16_t> dx;
  std::vector<float> dw;  // of this rank's rows
};
Outcome download(DeviceSession& device, const Tensor& loss, const Tensor& dx, const Tensor& dw);

// On every rank.
bool same_bits(const Outcome& a, const Outcome& b, const World& world);

// Against the world of one, the worst rank: members loss_relative, dx_relative_l2, dw_relative_l2,
// the bounds, passed.
nlohmann::json compare(const Outcome& ours, const Outcome& truth, const World& world);

}  // namespace talea::bench
