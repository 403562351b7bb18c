// What: the ranks of a call compare what they were asked to do, before any work; a rank that cannot
//       make the call says so in place of it.
// Why: a disagreement, or one rank's bad tensor, is an error on all ranks, not a hang.
// Never: knows an operator: fields are names and texts.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "talea/communicator.hpp"
#include "talea/tensor.hpp"

namespace talea {

struct AgreedField {
  std::string name;
  std::string value;
};

// What a replicated host tensor holds, as a field's value; absent and device tensors have no hash.
std::string content_of(const Tensor& t);

// One of a call's groups of ranks, and how many bytes of its own each of them has in agree().
struct Meeting {
  Communicator* ranks = nullptr;  // null: no group, or one that is not asked
  size_t own_bytes = 0;
  bool met = false;  // agree() was called, or this rank has said why it will not be

  bool with_others() const { return ranks && ranks->size() > 1; }
};

// Every rank's `own` bytes, in rank order; nothing where the communicator has no channel for host
// memory. One small exchange: a hash of the fields travels with `own`, their texts only where the
// hashes differ. Then it throws Error(invalid_data) that names the first field that differs, on
// every rank. Where a rank has thrown before, see together(), it throws "rank R: " and that error.
std::optional<std::vector<std::byte>> agree_bytes(const std::vector<AgreedField>& fields,
                                                  std::span<const std::byte> own, Meeting& meeting);

// The same for a plain value of every rank.
template <class T>
std::optional<std::vector<T>> agree(const std::vector<AgreedField>& fields, const T& own,
                                    Meeting& meeting) {
  const auto bytes = agree_bytes(fields, std::as_bytes(std::span(&own, 1)), meeting);
  if (!bytes) return std::nullopt;
  std::vector<T> all(static_cast<size_t>(meeting.ranks->size()));
  std::memcpy(all.data(), bytes->data(), bytes->size());
  return all;
}

// The receipt's note of a call whose ranks could not compare.
std::string not_compared(const Meeting& meeting);

// Runs `call`, which meets the groups in their order. What it throws before it has met a group is
// told to the ranks of that group, and thrown again.
void tell_if_it_fails(std::span<Meeting> groups, const std::function<void()>& call);

// call() by a rank that others wait for: as above; in a world of one nothing but the call.
template <class Call>
auto together(std::span<Meeting> groups, Call&& call) {
  bool others = false;
  for (const Meeting& m : groups) others = others || m.with_others();
  if (!others) return call();
  std::optional<decltype(call())> done;
  tell_if_it_fails(groups, [&] { done.emplace(call()); });
  return std::move(*done);
}

// Whether it throws. For what a rank does on its own before a call that it shares: the call throws
// the same, and tells the others.
bool fails(const std::function<void()>& alone);

}  // namespace talea
