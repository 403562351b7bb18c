// What: parts of a case: some of its tokens or heads, as a call of their own.
// Why: cutting, packing and handing states on are tested against the whole.
// Never: computes.
#pragma once

#include <cmath>

#include "ops/mamba3/run.hpp"

namespace talea::yardsticks::mamba3 {

// The axis of the tokens, or -1.
inline int token_axis(const std::string& name) {
  std::string of = name;
  if (of.rfind("d_", 0) == 0 && of.size() > 2 && of != "d_out") of = of.substr(2);
  for (const char* n : {"q", "k", "v", "z", "angles", "out", "d_out"})
    if (of == n && name != "d") return 1;
  for (const char* n : {"adt", "dt", "trap"})
    if (of == n) return 2;
  return -1;
}

// Elements [first, last) of one axis, laid out densely.
inline HostTensor part(const HostTensor& t, int axis, int64_t first, int64_t last) {
  std::vector<int64_t> shape = t.shape();
  const int64_t whole = shape[static_cast<size_t>(axis)];
  shape[static_cast<size_t>(axis)] = last - first;
  HostTensor to(t.dtype(), shape);
  int64_t inner = 1;
  for (size_t i = static_cast<size_t>(axis) + 1; i < shape.size(); ++i) inner *= shape[i];
  for (int64_t i = 0; i < to.elements(); ++i) {
    const int64_t low = i % inner, at = i / inner % std::max<int64_t>(last - first, 1);
    const int64_t high = i / inner / std::max<int64_t>(last - first, 1);
    to.set(i, t.get((high * whole + first + at) * inner + low));
  }
  return to;
}

// Tokens [first, last) of a dense case, with all else as it is.
inline Case tokens_of(const Case& c, int64_t first, int64_t last) {
  Case p = c;
  p.size.S = last - first;
  p.rows = {};
  for (auto& [name, tensor] : p.in)
    if (const int axis = token_axis(name); axis > 0)
      tensor = part(c.in.at(name), axis, first, last);
  return p;
}

// The axis of the heads, or -1.
inline int head_axis(const Case& c, const std::string& name) {
  if (name == "cu_seqlens" || name == "q" || name == "k" || name == "d_q" || name == "d_k")
    return -1;
  const std::string of = name.substr(name.rfind('_') + 1);
  const bool state =
      name.find("initial_") != std::string::npos || name.find("final_") != std::string::npos;
  if (state) return of == "k" && (c.size.rank_axis || c.size.R > 1) ? 2 : 1;
  if (name == "out" || name == "d_out") return c.reduce() ? 2 : 3;
  const int axis = token_axis(name);
  if (axis == 2) return 1;
  if (axis == 1) return name.find("angles") != std::string::npos && c.size.shared_angles ? -1 : 2;
  return 0;
}

// Heads [first, last) with groups [group, group + groups).
inline Case heads_of(const Case& c, int64_t first, int64_t last, int64_t group, int64_t groups) {
  Case p = c;
  p.size.H = last - first;
  p.size.G = groups;
  const int axis = c.size.rank_axis || c.size.R > 1 ? 3 : 2;
  for (auto& [name, tensor] : p.in) {
    if (name == "q" || name == "k")
      tensor = part(c.in.at(name), axis, group, group + groups);
    else if (const int a = head_axis(c, name); a >= 0)
      tensor = part(c.in.at(name), a, first, last);
  }
  return p;
}

inline void put_into(HostTensor& whole, const HostTensor& piece, int axis, int64_t first) {
  int64_t inner = 1;
  const auto& shape = piece.shape();
  for (size_t i = static_cast<size_t>(axis) + 1; i < shape.size(); ++i) inner *= shape[i];
  const int64_t own = shape[static_cast<size_t>(axis)];
  const int64_t all = whole.shape()[static_cast<size_t>(axis)];
  for (int64_t i = 0; i < piece.elements(); ++i)
    whole.set((i / inner / own * all + first + i / inner % own) * inner + i % inner, piece.get(i));
}

// Outputs and gradients of a case of `S` tokens as two calls, cut before token `cut`: states go
// from the first to the second, their gradients back, and gradients that both have are added. like:
// the same of one call.
inline Tensors cut_and_joined(const std::string& lane, const Case& c, int64_t cut, Tensors like) {
  Case head = tokens_of(c, 0, cut), tail = tokens_of(c, cut, c.size.S);
  const auto hand = [](Case& to, const char* as, const Outcome& from, const char* made) {
    for (const char* s : {"angle", "ssm", "k", "v"})
      to.in[as + std::string(s)] = from.out.at(made + std::string(s));
  };
  hand(tail, "initial_", run(lane, head, {.backward = false}), "final_");
  const Outcome second = run(lane, tail);
  hand(head, "d_final_", second, "d_initial_");
  const Outcome first = run(lane, head);
  for (auto& [name, tensor] : like) {
    const int axis = token_axis(name);
    const HostTensor &a = first.out.at(name), &b = second.out.at(name);
    if (axis > 0) {
      put_into(tensor, a, axis, 0);
      put_into(tensor, b, axis, cut);
    } else if (name.starts_with("final_")) {
      tensor = b;
    } else if (name.starts_with("d_initial_")) {
      tensor = a;
    } else {
      for (int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, a.get(i) + b.get(i));
    }
  }
  return like;
}

// A packed case of one batch entry with these lengths.
inline void pack(Case& c, const std::vector<int64_t>& ends) {
  c.cu = ends;
  HostTensor cu(DType::i32, {static_cast<int64_t>(ends.size())});
  for (size_t i = 0; i < ends.size(); ++i)
    cu.set(static_cast<int64_t>(i), static_cast<double>(ends[i]));
  c.in["cu_seqlens"] = cu;
}

// What sequence n of a pack has by itself; "" where all its rows and states have the bits that
// `all` has of them. dense: the case whose tokens and states were packed.
inline std::string differs_alone(const std::string& lane, const Case& dense, const Case& packed,
                                 const Outcome& all, size_t n) {
  const int64_t begin = packed.cu[n], end = packed.cu[n + 1], row = static_cast<int64_t>(n);
  Case one = tokens_of(dense, begin, end);
  for (const char* s : {"angle", "ssm", "k", "v"})
    for (const char* prefix : {"initial_", "d_final_"}) {
      const std::string name = prefix + std::string(s);
      one.in[name] = part(packed.in.at(name), 0, row, row + 1);
    }
  Tensors same;
  for (const auto& [name, tensor] : all.out) {
    if (const int axis = token_axis(name); axis > 0)
      same[name] = part(tensor, axis, begin, end);
    else if (name.starts_with("final_") || name.starts_with("d_initial_"))
      same[name] = part(tensor, 0, row, row + 1);
  }
  EXPECT_GT(same.size(), 12u);
  return same_bits(same, run(lane, one).out);
}

inline bool all_finite(const HostTensor& t) {
  for (int64_t i = 0; i < t.elements(); ++i)
    if (!std::isfinite(t.get(i))) return false;
  return true;
}

// A model's shape in small: MIMO or SISO, groups between 1 and H, everything present.
inline Case usual(int64_t S, int64_t R = 2, DType dtype = DType::f32, uint64_t seed = 5) {
  Sizes s{1, S, 4, 2, 16, 8, R, 6};
  s.rank_axis = R > 1;
  return full_case(s, dtype, seed);
}

}  // namespace talea::yardsticks::mamba3
