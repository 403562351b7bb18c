// What: the flags of the scan's options and sizes, and what they say.
// Why: scan, check, bench and explain spell them alike.
// Never: checks what the library checks; it names argument and value itself.
#pragma once

#include "context.hpp"
#include "talea/mamba3.hpp"

namespace talea::cli::scan {

struct OptionFlags {
  std::string rotary_pairs = "automatic", sequence_check = "automatic", schedule = "automatic";
  std::string lane = "auto", workspace_limit = "256MiB", norm_eps = "1e-5";
  bool head_norm = false;
  int64_t chunk = 0;
  int threads = 0;

  void add(CLI::App& sub, bool with_lane);
  // A note of what a step does not read, which is then as if it were not given.
  void drop_unread_of_step(const Context& context, const CLI::App& sub);
  mamba3::Options options() const;
};

// A problem without files, for check, bench and explain.
struct SizeFlags {
  int64_t batch = 1, tokens = 1024, heads = 8, groups = 1, state_dim = 128, head_dim = 64, rank = 1;
  void add(CLI::App& sub);
};

mamba3::Pass parse_pass(const std::string& text);  // forward, backward, step

}  // namespace talea::cli::scan
