// What: the device half of `talea bench`: what is asked for, as a value.
// Why: host and device lanes share the flags; their clocks, memory and limits differ.
// Never: mixes the two in one run.
#pragma once

#include "options.hpp"

namespace talea::cli {

struct DeviceBench {
  OptionFlags options;
  ShapeFlags shape;
  std::string dtype = "bf16", outputs = "loss,dx,dw", receipt;
  std::vector<std::string> lanes, limits;  // every lane runs at every workspace limit
  std::vector<std::string> inputs;         // of bias, token_weight, upstream
  std::string dw = "main_grad";            // main_grad (added in fp32), fp32, weight (its dtype)
  bool late_upstream = false;              // loss first, then a second call with the gradients
  bool also_plain = false;                 // beside each run the mean loss of every token alone
  double ignored = 0, spread = 1;
  int repeats = 5;
  uint64_t seed = 1;
};

void run_device_bench(Context& context, const DeviceBench& bench);

}  // namespace talea::cli
