// What: the definition's recurrence and its adjoint in fp64, written down naively.
// Why: an oracle that shares code with the library would share its mistakes; golden projections of
//      definition.py, which holds itself against differences and autograd, hold this one.
// Never: includes anything of src/.
#pragma once

#include "yardsticks/mamba3/case.hpp"

namespace talea::yardsticks::mamba3 {

using Values = std::map<std::string, std::vector<double>>;

// Every output of forward and every gradient of the case, row-major in the shapes of shape_of().
// Backward where the case has d_out or a d_final_*. "noise:d_angles" (adt, dt, trap, initial_angle
// alike): how large the terms are whose sum each element is; what cancels leaves roundings of that
// size (docs/decisions/0030-what-turns-leave.md). With a head norm, "noise:" of every output gains
// how far it moves, in units of 2^-23, when each y moves by 2^-23 of the terms that it sums.
// "rounds:d_dt", "rounds:d_trap" of 16-bit problems with few tokens: the deviation that one
// rounding of each row of a product leaves of an element, 0 in others.
Values oracle(const Case& c);

}  // namespace talea::yardsticks::mamba3
