// What: a field of a struct as a value: its name and where it lies; and an enum's words.
// Why: an operator lists the fields of a struct once; conversions, checks, handshake and receipts
// are loops over the list.
// Never: knows an operator; each has a fields.hpp of its own.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "talea/tensor.hpp"

namespace talea {

// The words of an enum whose values count from 0, as options are written:
//   template <> struct Words<Reduction> { static constexpr const char* list[] = {"none", ...}; };
template <class Enum>
struct Words;

template <>
struct Words<DType> {
  static constexpr const char* list[] = {"fp32",  "bf16",  "fp16",     "fp64",
                                         "int32", "int64", "fp8_e4m3", "uint8"};
};

template <class Enum>
constexpr const char* word(Enum value) {
  return Words<Enum>::list[static_cast<int>(value)];
}

template <class Enum>
constexpr int32_t last_value() {
  return static_cast<int32_t>(std::size(Words<Enum>::list)) - 1;
}

// A field's value as text: an enum's word, "true", a number in its shortest exact form.
template <class Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return word(value);
  else
    return fmt::format("{}", value);
}

struct NamedTensor {
  const char* name;
  const Tensor* tensor;
};

// A tensor of a struct, in C++ and in C.
template <class Struct, class CStruct, class CTensor>
struct TensorField {
  const char* name;
  Tensor Struct::*member;
  CTensor CStruct::*c;
};

// An option, or a fact of a result: any type, the C member's beside it.
template <class Struct, class Value, class CStruct, class CValue>
struct Field {
  const char* name;
  Value Struct::*member;
  CValue CStruct::*c;
  bool agreed = false;     // an option: ranks must agree on it
  const char* about = "";  // an option: what its flag says. A fact: its place in JSON, a pointer
};

template <class S, class V, class C, class CV, class... More>
Field(const char*, V S::*, CV C::*, More...) -> Field<S, V, C, CV>;

// f(field) for each of a tuple of fields.
template <class Fields, class F>
constexpr void for_each_field(const Fields& fields, F&& f) {
  std::apply([&](const auto&... field) { (f(field), ...); }, fields);
}

// The tensors of `s`, present or not, in the order of the list: entries with `name` and `member`.
template <class Struct, class List>
std::vector<NamedTensor> tensors_of(const Struct& s, const List& list) {
  std::vector<NamedTensor> all;
  all.reserve(std::size(list));
  for (const auto& field : list) all.push_back({field.name, &(s.*field.member)});
  return all;
}

}  // namespace talea
