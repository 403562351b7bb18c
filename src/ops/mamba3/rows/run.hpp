// What: the passes of lane cuda as a sequence of launches.
// Why: what is queued when does not depend on who runs it: a device, or a host in a test.
// Never: allocates, synchronises, or looks at a tensor.
#pragma once

#include "ops/mamba3/rows/plan.hpp"
#include "ops/mamba3/rows/sums.hpp"

namespace talea::mamba3 {
struct Call;
}

namespace talea::mamba3::cuda {

// Runs what a pass is made of; each call sees what those before it wrote.
class Machine {
 public:
  virtual ~Machine() = default;
  virtual void read_sequences(const Sizes& sizes, const Sequences& from) = 0;
  virtual void clear_padding(const Args& args) = 0;
  virtual void forward(const Args& args) = 0;
  virtual void begin_units(const Args& args, const Wave& wave) = 0;
  virtual void segment_states(const Args& args, const Wave& wave) = 0;
  virtual void slice_back(const Args& args, const Wave& wave) = 0;
  virtual void sum_rows(const Args& args, const Wave& wave) = 0;
  virtual void clear_totals(const Args& args) = 0;
  virtual void add_parameters(const Args& args, const Wave& wave) = 0;
  virtual void store_parameters(const Args& args) = 0;
};

Args args_of(const Call& call, const Plan& plan, const Buffers& buffers);
Sequences sequences_of(const Call& call, const Buffers& buffers);

// Queues the pass of the call.
void run_pass(Machine& machine, const Call& call, const Plan& plan, const Buffers& buffers);

}  // namespace talea::mamba3::cuda
