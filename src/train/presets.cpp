// What: the presets' numbers.
// Why: short to read, and one place to change.
// Never: differs between the command line and the gates.
#include "train/presets.hpp"

#include "core/fail.hpp"

namespace talea::train {

std::vector<std::string> preset_names() { return {"long", "demo", "smoke"}; }

TrainConfig preset(const std::string& name) {
  TrainConfig c;
  c.data.epochs = 8;
  c.data.total_tokens = 131072;
  c.max_steps = 850;
  if (name == "long") return c;
  if (name == "smoke") {
    c.max_steps = 70;
    return c;
  }
  require(name == "demo", ErrorKind::usage, "preset = {}: no such preset (long, demo, smoke)",
          name);
  c.data.seq_len = 32;
  c.data.batch = 2;
  c.grad_accum = 4;
  c.max_steps = 400;
  c.optimizer.lr = 2e-3;
  c.optimizer.schedule = Schedule::cosine;
  c.optimizer.warmup_steps = 20;
  c.optimizer.min_lr = 2e-4;
  return c;
}

}  // namespace talea::train
