// What: one call of an operator by one rank of the MPI tests.
// Why: a bad rank is a matter of every operator; their cases bear the same names.
// Never: judges a value: the operators' own rank tests do.
#pragma once

#include "talea/communicator.hpp"

namespace talea::testing {

// A bad one has another option than the other ranks, or data that it refuses.
enum class Bad { no, option, data };
void call_attention(Communicator& c, Bad bad);  // heads over the ranks; `scale`, `indices`
void call_scan(Communicator& c, Bad bad);       // tokens over the ranks; `norm_eps`

}  // namespace talea::testing
