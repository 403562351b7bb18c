// What: see files.hpp.
// Why: see files.hpp.
// Never: writes.
#include "files.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/fail.hpp"
#include "core/half.hpp"
#include "io/read_tensor.hpp"

namespace talea::cli {
namespace {

// Calls body(offset in elements of each view) for every element, the last axis fastest.
template <typename Body>
void for_each_offset(const Tensor& t, const Tensor& other, Body&& body) {
  std::array<int64_t, max_rank> at{};
  const int64_t n = t.elements();
  for (int64_t i = 0; i < n; ++i) {
    int64_t a = 0, b = 0;
    for (int d = 0; d < t.rank; ++d) {
      a += at[static_cast<size_t>(d)] * t.stride[static_cast<size_t>(d)];
      b += at[static_cast<size_t>(d)] * other.stride[static_cast<size_t>(d)];
    }
    body(a, b);
    for (int d = t.rank - 1; d >= 0; --d) {
      if (++at[static_cast<size_t>(d)] < t.shape[static_cast<size_t>(d)]) break;
      at[static_cast<size_t>(d)] = 0;
    }
  }
}

}  // namespace

Tensor TensorFiles::read(const std::string& name, const std::string& argument) {
  if (argument.empty()) return {};
  io::HostTensor t;
  try {
    t = io::read_tensor(argument);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("--{}: {}", name, e.what()));
  }
  InputFact fact{name, argument, t.view.dtype, {}, io::tensor_sha256(t.view)};
  fact.shape.assign(t.view.shape.begin(), t.view.shape.begin() + t.view.rank);
  facts_.push_back(std::move(fact));
  owners_.push_back(t);
  return t.view;
}

std::vector<GivenFile> TensorFiles::given() const {
  std::vector<GivenFile> list;
  for (const InputFact& fact : facts_) {
    std::string tensor = fact.name == "upstream"       ? "d_o"
                         : fact.name == "upstream-lse" ? "d_lse"
                                                       : fact.name;
    std::replace(tensor.begin(), tensor.end(), '-', '_');
    list.push_back({tensor, "--" + fact.name, fact.source});
  }
  return list;
}

std::vector<std::string> parse_names(const std::string& flag, const std::string& text,
                                     const std::vector<std::string>& known) {
  std::vector<std::string> names;
  for (const std::string& name : split(text, ',')) {
    require(std::find(known.begin(), known.end(), name) != known.end(), ErrorKind::usage,
            "{} {}: unknown; one of {}", flag, name, fmt::join(known, ", "));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

void require_causal(bool causal, std::initializer_list<std::pair<const char*, bool>> given) {
  for (const auto& [flag, is_given] : given)
    require(causal || !is_given, ErrorKind::usage, "--{}: without --causal it would do nothing",
            flag);
}

Tensor slice(const Tensor& t, int axis, int64_t begin, int64_t end) {
  if (!t) return t;
  Tensor part = t;
  const auto i = static_cast<size_t>(axis);
  if (part.data) part.data = static_cast<char*>(part.data) + begin * t.stride[i] * size_of(t.dtype);
  part.shape[i] = end - begin;
  return part;
}

Tensor swapped(const Tensor& t) {
  if (!t || t.rank < 2) return t;
  Tensor other = t;
  std::swap(other.shape[0], other.shape[1]);
  std::swap(other.stride[0], other.stride[1]);
  return other;
}

void copy_elements(const Tensor& from, const Tensor& to) {
  const auto bytes = static_cast<size_t>(size_of(from.dtype));
  for_each_offset(from, to, [&](int64_t a, int64_t b) {
    std::memcpy(static_cast<char*>(to.data) + b * static_cast<int64_t>(bytes),
                static_cast<const char*>(from.data) + a * static_cast<int64_t>(bytes), bytes);
  });
}

double l2_norm(const Tensor& t) {
  double sum = 0;
  for_each_offset(t, t, [&](int64_t a, int64_t) {
    const double v = load_element(t.data, t.dtype, a);
    sum += v * v;
  });
  return std::sqrt(sum);
}

}  // namespace talea::cli
