// What: a backward that knows G = 1 and G = H only, and bias gradients taken after the group sum.
// Why: the middle raises; where it is patched by a sum in the wrong place, heads of a group share
// one bias gradient.
// Never: changes the forward, which is right everywhere.
#include <fmt/format.h>

#include "repro/support/peak.hpp"
#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

// The two branches of the kernel that knows no others.
bool has_a_branch(int64_t groups, int64_t heads) { return groups == 1 || groups == heads; }

// d_q_bias of every head from rows that were summed over the heads of a group before.
std::vector<double> bias_after_the_sum(const Scan& s, const std::vector<double>& d_q) {
  std::vector<double> bias(static_cast<size_t>(s.H * s.R * s.N), 0);
  for (int64_t bt = 0; bt < s.B * s.S; ++bt)
    for (int64_t r = 0; r < s.R; ++r)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t n = 0; n < s.N; ++n)
          bias[static_cast<size_t>((h * s.R + r) * s.N + n)] +=
              d_q[static_cast<size_t>(((bt * s.R + r) * s.G + h / (s.H / s.G)) * s.N + n)];
  return bias;
}

Scan problem(int64_t groups, int64_t heads, int64_t tokens, int64_t columns) {
  Scan sizes{1, tokens, heads, groups, 2, columns, 8, 0, {}, {}, {}};
  return draw_scan(sizes, {"q_bias", "k_bias", "mimo_v", "mimo_out", "d_out"}, 41);
}

// The same problem with q and k copied to every head: gradients come per head.
Scan per_head(const Scan& s) {
  Scan wide = s;
  wide.G = s.H;
  for (const char* name : {"q", "k"}) {
    auto& to = wide.in[name];
    to.clear();
    for (int64_t row = 0; row < s.B * s.S * s.R; ++row)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t n = 0; n < s.N; ++n)
          to.push_back(s.in.at(name)[static_cast<size_t>((row * s.G + h / (s.H / s.G)) * s.N + n)]);
  }
  return wide;
}

void run_all(Report& r) {
  // Gradients per head and then a sum, beside one sum inside: measured first, in a process of its
  // own, which must not inherit OpenMP's threads.
  const Scan large = problem(2, 64, 256, 64);
  const Peak ours = measure_peak([&] { run_scan(large, "auto"); });
  const Peak wide = measure_peak([&] { run_scan(per_head(large), "auto"); });
  r.memory("peak memory, groups inside, of that with q, k and their gradients per head",
           ours.finished ? ours.bytes : -1, wide.finished ? wide.bytes : 0, 0.5);
  r.broken("G = 8 of H = 128: branches that would run", has_a_branch(8, 128) ? 0 : 1, 0);
  for (const int64_t groups : {1, 2, 8, 16, 32}) {
    const Scan s = problem(groups, 32, 6, 4);
    const Values truth = run_scan(s, "reference").t;
    Values broken = truth;
    broken["d_q_bias"] = bias_after_the_sum(s, truth.at("d_q"));
    const std::string which = fmt::format("G = {} of H = 32", groups);
    if (groups < 32)
      r.broken(which + ": d_q_bias after the group sum", off(broken, truth, "d_q_bias"), 0.1);
    else
      r.figure(which + ": d_q_bias after the group sum (a group is a head)",
               off(broken, truth, "d_q_bias"));
    if (r.fix_disabled() && groups == 32) continue;
    const Values ours = r.fix_disabled() ? broken : run_scan(s, "auto").t;
    r.ours(which + ": d_q_bias", off(ours, truth, "d_q_bias"), 2e-6);
    if (r.fix_disabled()) continue;
    r.ours(which + ": d_q", off(ours, truth, "d_q"), 2e-6);
    r.ours(which + ": d_k", off(ours, truth, "d_k"), 2e-6);
    r.ours(which + ": a second run, elements that differ", run_scan(s, "auto").t == ours ? 0 : 1,
           0);
  }
}

}  // namespace

extern const Reproducer mamba3_groups{"mamba3_groups", "M3-1 M3-2",
                                      "gradients of groups between 1 and H, and of their biases",
                                      run_all};

}  // namespace talea::repro
