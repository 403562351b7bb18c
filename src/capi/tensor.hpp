// What: the checks and copies from the C structs that every operator shares to C++ values.
// Why: a caller built against another header, or a zeroed struct, gets an error, never a crash.
// Never: guesses a missing field, touches tensor memory, or knows an operator.
#pragma once

#include <memory>
#include <string>

#include "core/fail.hpp"
#include "core/fields.hpp"
#include "talea/communicator.hpp"
#include "talea/talea.h"

namespace talea::capi {

// question: touches no data; null tensor addresses are replaced by distinct made-up ones.
enum class Purpose { call, phases, question };

// Addresses for tensors whose data no question needs.
class MadeUpAddresses {
 public:
  explicit MadeUpAddresses(Purpose purpose) : wanted_(purpose == Purpose::question) {}
  void* or_made_up(void* given, const Tensor& like);

 private:
  bool wanted_;
  uintptr_t next_ = uintptr_t{1} << 57;  // behind all that a process can have
};

// struct_bytes is the first field of every struct.
template <class Struct>
void check_size(const char* name, const Struct* s) {
  require(s, ErrorKind::usage, "{}: null pointer", name);
  require(s->struct_bytes == static_cast<int64_t>(sizeof(Struct)), ErrorKind::usage,
          "{}: struct_bytes = {} where this library (ABI version {}) has {}", name, s->struct_bytes,
          TALEA_ABI_VERSION, sizeof(Struct));
}

// For the ..._options_init() functions, whose struct holds nothing yet.
template <class Struct>
void check_init(const char* name, const Struct* s, int64_t struct_bytes) {
  require(s, ErrorKind::usage, "{}: null pointer", name);
  require(struct_bytes == static_cast<int64_t>(sizeof(Struct)), ErrorKind::usage,
          "{}: struct_bytes = {} where this library (ABI version {}) has {}", name, struct_bytes,
          TALEA_ABI_VERSION, sizeof(Struct));
}

// Size, abi_version and reserved of an operator's args.
template <class Args>
void check_args(const Args* args) {
  check_size("args", args);
  require(args->abi_version == TALEA_ABI_VERSION, ErrorKind::usage,
          "args: abi_version = {} where this library has {}", args->abi_version, TALEA_ABI_VERSION);
  require(args->reserved == 0, ErrorKind::usage, "args: reserved = {}: must be 0", args->reserved);
}

template <class Enum>
Enum checked_enum(const char* name, int32_t value, int32_t last) {
  require(value >= 0 && value <= last, ErrorKind::usage, "{} = {}: must lie in [0, {}]", name,
          value, last);
  return static_cast<Enum>(value);
}

Tensor tensor(const char* name, const talea_tensor& from, MadeUpAddresses& addresses);

// Every tensor of a list of {name, member, c}.
template <class CStruct, class Struct, class List>
void read_tensors(const CStruct& from, Struct& to, const List& fields, MadeUpAddresses& addresses) {
  for (const auto& f : fields) to.*f.member = tensor(f.name, from.*f.c, addresses);
}

// One option: enums are checked, a null string keeps the default.
template <class CStruct, class Struct, class F>
void read_option(const CStruct& from, Struct& to, const F& field) {
  auto& value = to.*field.member;
  const auto& given = from.*field.c;
  using Value = std::remove_reference_t<decltype(value)>;
  if constexpr (std::is_enum_v<Value>) {
    value = checked_enum<Value>(field.name, given, last_value<Value>());
  } else if constexpr (std::is_same_v<Value, std::string>) {
    if (given) value = given;
  } else if constexpr (std::is_same_v<Value, bool>) {
    value = given != 0;
  } else {
    value = given;
  }
}

// Every option of a tuple of fields; null: the defaults.
template <class CStruct, class Struct, class Fields>
void read_options(const char* name, const CStruct* from, Struct& to, const Fields& fields) {
  if (!from) return;
  check_size(name, from);
  for_each_field(fields, [&](const auto& f) { read_option(*from, to, f); });
}

// The defaults of a C++ struct as C has them; strings are null.
template <class Struct, class CStruct, class Fields>
void write_defaults(CStruct* to, int64_t struct_bytes, const Fields& fields) {
  check_init("options", to, struct_bytes);
  const Struct from;
  *to = {};
  to->struct_bytes = struct_bytes;
  for_each_field(fields, [&](const auto& f) {
    using CValue = std::remove_reference_t<decltype(to->*f.c)>;
    if constexpr (!std::is_pointer_v<CValue>) to->*f.c = static_cast<CValue>(from.*f.member);
  });
}

// The facts of a result as C has them: strings point into the result.
template <class Struct, class CStruct, class Fields>
void write_facts(const Struct& from, CStruct& to, const Fields& fields) {
  to.struct_bytes = sizeof to;
  for_each_field(fields, [&](const auto& f) {
    using CValue = std::remove_reference_t<decltype(to.*f.c)>;
    if constexpr (std::is_pointer_v<CValue>)
      to.*f.c = (from.*f.member).c_str();
    else
      to.*f.c = static_cast<CValue>(from.*f.member);
  });
}

// optional: rank, size and device are all that is asked of a table without functions.
enum class Callbacks { needed, optional };

// A communicator made of the caller's functions.
std::unique_ptr<Communicator> make_communicator(const char* name, const talea_communicator* c,
                                                Callbacks callbacks);

}  // namespace talea::capi
