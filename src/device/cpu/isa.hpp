// What: a ceiling on the instruction sets that the host code of this process uses.
// Why: one machine can show what a lesser one would get, lanes and plain products alike.
// Never: offers more than the CPU has.
#pragma once

#include <string>

namespace talea::cpu {

enum class IsaLimit { best, avx2 };

// To be called before the first product: oneDNN makes its choice once. Throws Error when it is too
// late, or when this machine has no such instruction set.
void limit_isa(IsaLimit limit);

// What the vector code and the plain products use, for receipts.
std::string isa_in_use();

}  // namespace talea::cpu
