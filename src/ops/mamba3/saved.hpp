// What: the opaque tensor that forward hands to backward: a mark of whose it is, checkpoints, and over
//       ranks of tokens what they told each other.
// Why: a tensor of another lane, chunk or problem is an error, not wrong gradients.
// Never: read by anyone but who wrote it: the lane, and the ranks around it.
#pragma once

#include <string>

#include "ops/mamba3/contract.hpp"

namespace talea::mamba3 {

// Bytes of the mark; a lane's own follow.
inline constexpr int64_t saved_mark_bytes = 64;

// What the caller keeps: the mark, and what the plan of the lane or of its ranks keeps.
int64_t saved_size(const Planned& plan);

// Checks sizes; on the host writes the mark of a forward, or holds a backward's against the
// problem. The tensors in `full` then begin behind the mark.
void take_saved(const Problem& p, const std::string& lane, const Planned& plan, FullAxes& full,
                Result& result);

// Axes of q from the slowest to the fastest: "b s r g n".
std::string memory_order_of(const Problem& p);

}  // namespace talea::mamba3
