// What: packed sequences whose final v is the last sequence's, and empty ones with unset states.
// Why: training never reads them; generation after a packed prefill does.
// Never: relies on what the memory held before.
#include <algorithm>
#include <cmath>

#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

// v[:, -1] of the pack for every sequence; the k of an empty sequence is what lies there: NaN here.
Values last_of_the_pack(const Scan& s, Values right) {
  auto& v = right.at("final_v");
  const int64_t row = s.H * s.P;
  for (int64_t n = 0; n < s.sequences(); ++n)
    for (int64_t i = 0; i < row; ++i)
      v[static_cast<size_t>(n * row + i)] = s.in.at("v")[static_cast<size_t>((s.S - 1) * row + i)];
  auto& k = right.at("final_k");
  const int64_t width = s.R * s.H * s.N;
  for (int64_t n = 0; n < s.sequences(); ++n)
    if (s.cu[static_cast<size_t>(n)] == s.cu[static_cast<size_t>(n) + 1])
      std::fill_n(k.begin() + n * width, width, __builtin_nan(""));
  return right;
}

void run_all(Report& r) {
  Scan sizes{1, 30, 4, 2, 2, 8, 8, 3, {}, {0, 11, 11, 12, 30}, {}};
  const Scan s = draw_scan(sizes,
                           {"initial_angle", "initial_ssm", "initial_k", "initial_v", "mimo_v",
                            "mimo_z", "mimo_out", "z"},
                           21);
  const Values truth = run_scan(s, "reference").t;
  const Values broken = last_of_the_pack(s, truth);
  r.broken("final_v of four packed sequences, the pack's last row", off(broken, truth, "final_v"),
           0.1);
  r.broken("final_k of an empty sequence, never written", off(broken, truth, "final_k"), 0.1);
  const Values ours = r.fix_disabled() ? broken : run_scan(s, "auto").t;
  r.ours("final_v", off(ours, truth, "final_v"), 0);
  r.ours("final_k", off(ours, truth, "final_k"), 2e-6);
  // The empty sequence hands its four states through.
  const auto handed = [&](const char* name, int64_t width) {
    double gap = 0;
    for (int64_t i = 0; i < width; ++i)
      gap += std::abs(ours.at(std::string("final_") + name)[static_cast<size_t>(width + i)] -
                      s.in.at(std::string("initial_") + name)[static_cast<size_t>(width + i)]);
    return gap;
  };
  r.ours("ssm handed through an empty sequence",
         r.fix_disabled() ? 1 : handed("ssm", s.H * s.P * s.N), 0);
  r.ours("v handed through an empty sequence", r.fix_disabled() ? 1 : handed("v", s.H * s.P), 0);
}

}  // namespace

extern const Reproducer mamba3_packed_states{
    "mamba3_packed_states", "M3-7 M3-8 M3-9",
    "final states of packed sequences: the neighbour's, or never written", run_all};

}  // namespace talea::repro
