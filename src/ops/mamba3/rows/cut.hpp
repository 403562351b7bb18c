// What: how heads are cut into units, where kernels know one N and one P.
// Why: slabs of P share turns and steps, parts of N what is summed over all columns.
// Never: cuts heads that have the N, P and R of the kernels' own.
#pragma once

#include "ops/mamba3/rows/args.hpp"

namespace talea::mamba3::cuda {

// A head is 2^part_bits parts of its N, each 2^slab_bits slabs of its P. `heads` of Sizes counts
// units; `columns`, `values` and `pairs` are those of a unit. Columns of a unit lie in two panels:
// of the head's the second begins panel_apart behind the first, and a part part_apart behind the
// other. A panel of a narrow head is filled up with zeros.
struct Cut {
  static constexpr int panel = 64;

  bool whole = true;  // no head is cut, or filled up
  int slab_bits = 0, part_bits = 0;
  int columns = 0, pairs = 0;  // N and A of a head
  int panel_apart = 0, part_apart = 0;
  // What a slab leaves for the next one, [blocks of the gradients, their heads] of slab_count; with
  // parts what they add up to: tiles of y and of the gradient of values, [the same, slabs, 2].
  float *slabs = nullptr, *tiles = nullptr;

  constexpr int bits() const { return part_bits + slab_bits; }
  constexpr int heads_of(const Sizes& s) const { return s.heads >> bits(); }
  // Slabs turn alike: parts of heads.
  constexpr int turning_of(const Sizes& s) const { return s.heads >> slab_bits; }
  // Of unit `number`.
  constexpr int head_of(int number) const { return number >> bits(); }
  constexpr int part_of(int number) const { return number >> slab_bits & ((1 << part_bits) - 1); }
  constexpr int slab_of(int number) const { return number & ((1 << slab_bits) - 1); }

  // The head's column that a column of a unit is; -1: none.
  constexpr int own_column(int of_part, int column) const {
    if (whole) return column;
    const int in_panel = column % panel;
    const int own = in_panel + column / panel * panel_apart + of_part * part_apart;
    return in_panel < panel_apart && own < columns ? own : -1;
  }
  constexpr bool has(int own) const { return whole || own >= 0; }
  // The first pair of a part, and how many it has.
  constexpr int first_pair(int of_part) const { return of_part * panel; }
  constexpr int pairs_of(const Sizes& s, int of_part) const {
    if (whole) return s.pairs;
    const int left = pairs - first_pair(of_part);
    return left < s.pairs ? left : s.pairs;
  }
};

// Of a kernel that is given one or none: the compiler knows which.
constexpr Cut cut_of() { return {}; }
constexpr Cut cut_of(const Cut& units) {
  Cut cut = units;
  cut.whole = false;
  return cut;
}

// Heads that are cut into `slabs` of their values alone, as kernels that know how many see them.
constexpr Cut cut_of_slabs(int slabs) {
  Cut cut;
  cut.whole = slabs == 1;
  while (1 << cut.slab_bits < slabs) ++cut.slab_bits;
  return cut;
}

// Whether the gradients form operands of a unit ahead and add up the units and heads of a part
// (lane sm90): of all columns of a head, in one or two slabs, of which two have room.
constexpr bool gradients_ahead(const Cut& cut, int64_t rank, int64_t pairs) {
  const bool slabs = cut.columns == 2 * Cut::panel && cut.slab_bits == 1;
  return (cut.whole || slabs) && has_two_heads(rank, pairs);
}

// d_adt, d_dt and d_trap of the tokens of a chunk, and d_angles.
constexpr int64_t slab_count(int64_t tokens, int64_t A) { return tokens * (3 + turned_pairs(A)); }

}  // namespace talea::mamba3::cuda
