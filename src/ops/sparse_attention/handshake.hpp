// What: the fields that the ranks of a call must share, and the shards they hold.
// Why: what may differ between ranks and what may not is this operator's to say.
// Never: touches q, kv or an output.
#pragma once

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// What a rank says of itself: the lane that will run, and what is wrong with its data, or "sound".
struct Told {
  std::string lane, data;
};

// Ranks that cut heads share everything but their heads; those that cut the sequence everything but
// their rows. Shards must be disjoint and cover the whole.
void shake_hands(const CheckedCall& c, const Told& told, Communicator& heads,
                 Communicator& sequence, Result& result);

}  // namespace talea::sparse_attention
