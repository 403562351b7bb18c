// What: the way through a device lane that a test forces, whatever the sizes of its problem.
// Why: a benchmark's way is chosen by size; judged against fp64 truth it has to be in small cases.
// Never: set outside of test programs; whoever keeps a plan keeps it with the value it was made
// for.
#pragma once

#include <optional>
#include <string_view>

namespace talea::lce {

// Unset: as the problem decides. Set: taken where the way can serve the problem at all.
struct Forced {
  std::optional<bool> two_terms;  // dz in two 16-bit terms (small weights), or in one (large ones)
  std::optional<bool> wide;       // lane sm90: the chunk's logits in fp32
  std::optional<bool> transform;  // lane sm90: a pass that turns the buffer into dz
  std::optional<bool> slices;     // lane sm90: gradients by slices of the vocabulary, or by chunks
  std::optional<bool> ahead;      // lane sm90: the next chunk's logits beside dW; never by force
  std::optional<bool> narrow;     // lane sm90: dX of few tiles in smaller ones; never by force
  std::optional<bool> codes;      // lane sm90: a bf16 dW is summed in codes, in the shortest chunks
  std::optional<bool> slow;       // lane sm90: dW that logits follow has two blocks: what does not
                                  // wait for it overtakes it
  bool operator==(const Forced&) const = default;
};
inline Forced forced;

// A test program's --force=NAME; false where there is no such way.
inline bool force(std::string_view name) {
  if (name == "one_term")
    forced.two_terms = false;
  else if (name == "two_terms")
    forced.two_terms = true;
  else if (name == "wide")
    forced.wide = true, forced.two_terms = false;
  else if (name == "folded")
    forced.wide = false, forced.two_terms = false;
  else if (name == "transformed")
    forced.transform = true, forced.two_terms = false;
  else if (name == "slices")
    forced.slices = true, forced.two_terms = false;
  else if (name == "chunks")
    forced.slices = false, forced.two_terms = false;
  else if (name == "not_ahead")
    forced.ahead = false, forced.two_terms = false;
  else if (name == "codes")
    forced.codes = true, forced.two_terms = false;
  else if (name == "not_narrow")
    forced.narrow = false, forced.two_terms = false;
  else
    return false;
  return true;
}

}  // namespace talea::lce
