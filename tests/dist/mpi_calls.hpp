// What: one call of an operator by one rank of the MPI tests.
// Why: a bad rank is a matter of every operator; their cases bear the same names.
// Never: judges a value: the operators' own rank tests do.
#pragma once

#include "talea/communicator.hpp"

namespace talea::testing {

// A bad one has another option than the other ranks.
void call_attention(Communicator& c, bool bad);  // heads over the ranks; `scale`
void call_scan(Communicator& c, bool bad);       // tokens over the ranks; `norm_eps`

}  // namespace talea::testing
