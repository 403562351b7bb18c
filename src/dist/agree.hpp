// What: the ranks of a call compare what they were asked to do, before any work.
// Why: a disagreement is an error that names the field, not a hang or a wrong number.
// Never: knows an operator: fields are names and texts.
#pragma once

#include <cstddef>
#include <cstring>
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

// Every rank's `own` bytes, in rank order; nothing where the communicator has no channel for host
// memory. One small exchange: a hash of the fields travels with `own`, their texts only where the
// hashes differ. Then it throws Error(invalid_data) that names the first field that differs, on
// every rank.
std::optional<std::vector<std::byte>> agree_bytes(const std::vector<AgreedField>& fields,
                                                  std::span<const std::byte> own, Communicator& c);

// The same for a plain value of every rank.
template <class T>
std::optional<std::vector<T>> agree(const std::vector<AgreedField>& fields, const T& own,
                                    Communicator& c) {
  const auto bytes = agree_bytes(fields, std::as_bytes(std::span(&own, 1)), c);
  if (!bytes) return std::nullopt;
  std::vector<T> all(static_cast<size_t>(c.size()));
  std::memcpy(all.data(), bytes->data(), bytes->size());
  return all;
}

}  // namespace talea
