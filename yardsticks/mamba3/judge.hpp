// What: the rule of "how right is right": a lane's tensors against the truth and the yardstick.
// Why: one rule for every lane and test, written so that NaN fails.
// Never: a tolerance that a test could choose.
#pragma once

#include <string>

#include "yardsticks/mamba3/oracle.hpp"

namespace talea::yardsticks::mamba3 {

double relative_l2(const std::vector<double>& ours, const std::vector<double>& truth);

// One tensor. `yardstick`: the same output of lane unfused on the same inputs; `noise` and
// `rounds`: of oracle(). Empty: it holds.
std::string judge_tensor(const Case& c, const std::string& name, const std::vector<double>& ours,
                         const std::vector<double>& truth, const std::vector<double>& yardstick,
                         const std::vector<double>& noise = {},
                         const std::vector<double>& rounds = {});

// Every output that `ours` has; at least one. `rounds_operands`: by a lane that multiplies rows
// that it has rounded to 16 bits.
std::string judge(const Case& c, const Tensors& ours, const Values& truth, const Tensors& yardstick,
                  bool rounds_operands = false);

// The same of several draws of a case, whose values lie behind each other.
std::string judge(const Case& c, const Values& ours, const Values& truth, const Values& yardstick,
                  bool rounds_operands);

// The values of each output behind those that `to` has of it.
void append(Values& to, const Tensors& outputs);
void append(Values& to, const Values& more);

}  // namespace talea::yardsticks::mamba3
