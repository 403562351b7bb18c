// What: decoding with 1 < G < H expands groups as if they were heads.
// Why: with G = 1 and G = H every way of expanding is the same, and only those are tested.
// Never: changes what the scan itself reads.
#include <fmt/format.h>

#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

void run_all(Report& r) {
  for (const int64_t groups : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{8}}) {
    const Scan s =
        draw_scan({2, 24, 8, groups, 1, 8, 8, 3, {}, {}, {}}, {"q_bias", "k_bias", "d"}, 31);
    const Values truth = plain_scan(s);
    Loop tiled;
    tiled.group_of = [groups](int64_t head) { return head % groups; };
    const Values broken = plain_scan(s, tiled);
    const std::string which = fmt::format("G = {} of H = 8", groups);
    if (groups == 1 || groups == 8)
      r.figure(which + ": groups laid out as heads (nobody notices)", off(broken, truth, "out"));
    else
      r.broken(which + ": groups laid out as heads", off(broken, truth, "out"), 0.1);
    const bool shows = groups != 1 && groups != 8;
    if (r.fix_disabled() && !shows) continue;
    r.ours(which, off(r.fix_disabled() ? broken : run_scan(s, "auto").t, truth, "out"), 2e-6);
  }
}

}  // namespace

extern const Reproducer mamba3_decode_groups{"mamba3_decode_groups", "M3-14",
                                             "decoding reads another group's keys", run_all};

}  // namespace talea::repro
