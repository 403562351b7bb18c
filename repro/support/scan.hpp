// What: what the reproducers of the Mamba-3 scan share: a drawn problem, the operator on it, and a
// plain recurrence in a chosen precision.
// Why: broken patterns are changes to a loop that a reader can follow.
// Never: holds a broken pattern of its own; the reproducers name what they change.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "repro/support/repro.hpp"
#include "talea/mamba3.hpp"

namespace talea::repro {

using Values = std::map<std::string, std::vector<double>>;

// Inputs in fp32 on the host, by the operator's names; what is absent is neutral.
struct Scan {
  int64_t B = 1, S = 1, H = 1, G = 1, R = 1, N = 2, P = 1, A = 0;
  std::map<std::string, std::vector<float>> in;
  std::vector<int32_t> cu;  // packed, where not empty
  mamba3::Options options;

  int64_t sequences() const { return cu.empty() ? B : static_cast<int64_t>(cu.size()) - 1; }
  std::vector<int64_t> shape(const std::string& name) const;
  float& at(const std::string& name, int64_t i) { return in[name][static_cast<size_t>(i)]; }
};

// q, k, v, adt, dt, trap, angles and what `more` names, as a model has them.
Scan draw_scan(const Scan& sizes, const std::vector<std::string>& more, uint64_t seed);

struct ScanAnswer {
  Values t;  // out, final_*, d_*
  mamba3::Result forward, backward;
};

// Every output of forward and, with d_out among the inputs, every gradient.
ScanAnswer run_scan(const Scan& s, const std::string& lane);

// One head of one sequence as a loop over tokens, in doubles; `stored` is applied to what is kept
// between tokens and `turn` gives the angle of a token from the one before and its increment.
struct Loop {
  std::function<double(double before, double increment)> turn = [](double a, double b) {
    return a + b;
  };
  std::function<int64_t(int64_t head)> group_of;  // of q and k; null: the operator's
  std::function<double(double)> step = [](double dt) { return dt; };  // what is read of dt
};
Values plain_scan(const Scan& s, const Loop& loop = {});

double off(const Values& ours, const Values& truth, const std::string& name);

}  // namespace talea::repro
