// What: the fields that the ranks of a call must share, and the shards they hold.
// Why: what may differ between ranks and what may not is this operator's to say.
// Never: touches q, kv or an output.
#pragma once

#include <array>

#include "dist/agree.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// The ranks of the heads, of the sequence, and of the batch where they meet in host memory; nobody
// where the caller wants no handshake.
using Meetings = std::array<Meeting, 3>;
Meetings meetings_of(const Ranks& ranks);

// Ranks that cut heads share everything but their heads; those that cut the sequence everything but
// their rows. Shards must be disjoint and cover the whole.
void shake_hands(const CheckedCall& c, const std::string& lane, Meetings& meetings, Result& result);

}  // namespace talea::sparse_attention
