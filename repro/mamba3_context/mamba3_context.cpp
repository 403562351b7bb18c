// What: a sequence cut into pieces whose states are handed on without the held-over token, or
// merged in the wrong order.
// Why: both are right for one piece, and nearly right where decays are strong.
// Never: needs a second process; a piece is a call.
#include <fmt/format.h>

#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

// Tokens [lo, hi) of s, a sequence of its own.
Scan piece(const Scan& s, int64_t lo, int64_t hi) {
  Scan p = s;
  p.S = hi - lo;
  for (auto& [name, values] : p.in) {
    const auto& all = s.in.at(name);
    const bool rows = name == "q" || name == "k" || name == "v" || name == "angles" || name == "z";
    const bool steps = name == "adt" || name == "dt" || name == "trap";
    if (!rows && !steps) continue;
    values.clear();
    if (rows) {
      const auto width = static_cast<int64_t>(all.size()) / s.S;
      values.assign(all.begin() + lo * width, all.begin() + hi * width);
    } else {
      for (int64_t h = 0; h < s.H; ++h)
        values.insert(values.end(), all.begin() + h * s.S + lo, all.begin() + h * s.S + hi);
    }
  }
  return p;
}

// Pieces one after the other; `states` of those before are handed on.
std::vector<double> in_pieces(const Scan& s, const std::vector<int64_t>& cuts,
                              const std::string& lane, const std::vector<std::string>& states) {
  std::vector<double> out;
  std::map<std::string, std::vector<float>> carried;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Scan p = piece(s, cuts[i], cuts[i + 1]);
    for (const auto& [name, values] : carried) p.in["initial_" + name] = values;
    const Values made = run_scan(p, lane).t;
    out.insert(out.end(), made.at("out").begin(), made.at("out").end());
    for (const std::string& name : states) {
      const auto& last = made.at("final_" + name);
      carried[name].assign(last.begin(), last.end());
    }
  }
  return out;
}

void run_all(Report& r) {
  const Scan s = draw_scan({1, 40, 4, 2, 2, 8, 8, 4, {}, {}, {}},
                           {"mimo_v", "mimo_out", "q_bias", "k_bias", "d"}, 81);
  const std::vector<double> truth = run_scan(s, "reference").t.at("out");
  const std::vector<int64_t> cuts = {0, 13, 13, 14, 40};
  const auto bare = in_pieces(s, cuts, "reference", {"angle", "ssm"});
  const auto still = in_pieces(s, cuts, "reference", {"ssm", "k", "v"});
  r.broken("pieces without the held-over token (k, v)", relative_l2(bare, truth), 1e-2);
  r.broken("pieces without the angle", relative_l2(still, truth), 1e-2);
  const auto ours =
      r.fix_disabled() ? bare : in_pieces(s, cuts, "auto", {"angle", "ssm", "k", "v"});
  r.ours("four pieces, one empty and one of one token", relative_l2(ours, truth), 2e-6);
  // merge((a1, T1), (a2, T2)) = (a1 a2, a2 T1 + T2), and with the two exchanged.
  const double a1 = 0.3, t1 = 2, a2 = 0.9, t2 = -1, h = 5;
  const double whole = a2 * (a1 * h + t1) + t2;
  const double merged = a1 * a2 * h + (a2 * t1 + t2), exchanged = a1 * a2 * h + (a1 * t2 + t1);
  r.broken("maps of pieces merged in the wrong order", relative(exchanged, whole), 1e-2);
  r.ours("maps of pieces merged in order", relative(r.fix_disabled() ? exchanged : merged, whole),
         1e-15);
}

}  // namespace

extern const Reproducer mamba3_context{"mamba3_context", "M3-22 M3-23",
                                       "pieces of a sequence, and what they hand on", run_all};

}  // namespace talea::repro
