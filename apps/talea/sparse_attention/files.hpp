// What: tensors of files named by flags, under the names of the receipt.
// Why: attend and index read many files; each message names the flag and the file.
// Never: writes.
#pragma once

#include <CLI/CLI.hpp>

#include "../context.hpp"
#include "core/receipt.hpp"
#include "io/host_tensor.hpp"

namespace talea::cli {

// What was read, kept alive, and as it stands in a receipt.
class TensorFiles {
 public:
  // An absent Tensor for an empty argument. Error naming "--name" and the file.
  Tensor read(const std::string& name, const std::string& argument);

  const std::vector<InputFact>& facts() const { return facts_; }
  // Under the names of the library.
  std::vector<GivenFile> given() const;

 private:
  std::vector<io::HostTensor> owners_;
  std::vector<InputFact> facts_;
};

// One flag that names a file, and the member it fills. The flag is the member's name with dashes
// where it is not `spelling`.
template <typename Inputs>
struct FileFlag {
  const char* spelling;
  const char* help;
  Tensor Inputs::*member;
};

// The arguments of a list of flags, in its order.
template <typename Inputs, size_t n>
class FileFlags {
 public:
  explicit FileFlags(const FileFlag<Inputs> (&list)[n]) : list_(list), given_(n) {}

  void add(CLI::App& sub) {
    for (size_t i = 0; i < n; ++i)
      sub.add_option(std::string("--") + list_[i].spelling, given_[i], list_[i].help);
  }
  Inputs read(TensorFiles& files) const {
    Inputs in;
    for (size_t i = 0; i < n; ++i) in.*list_[i].member = files.read(list_[i].spelling, given_[i]);
    return in;
  }
  const std::vector<std::string>& arguments() const { return given_; }
  const std::string& argument(Tensor Inputs::*member) const {
    for (size_t i = 0; i < n; ++i)
      if (list_[i].member == member) return given_[i];
    static const std::string none;
    return none;
  }
  const char* spelling(Tensor Inputs::*member) const {
    for (size_t i = 0; i < n; ++i)
      if (list_[i].member == member) return list_[i].spelling;
    return "";
  }

 private:
  const FileFlag<Inputs> (&list_)[n];
  std::vector<std::string> given_;
};

// The index of `text` among `names`, as an enum. CLI11 has checked it.
template <typename Enum>
Enum choice(const std::string& text, std::initializer_list<const char*> names) {
  int at = 0;
  for (const char* name : names) {
    if (text == name) break;
    ++at;
  }
  return static_cast<Enum>(at);
}

// Names between commas, each among `known`: Error(usage) naming flag and name.
std::vector<std::string> parse_names(const std::string& flag, const std::string& text,
                                     const std::vector<std::string>& known);

// Error(usage) for a flag that would do nothing: each is of --causal.
void require_causal(bool causal, std::initializer_list<std::pair<const char*, bool>> given);

// A view of [begin, end) of one axis.
Tensor slice(const Tensor& t, int axis, int64_t begin, int64_t end);
// The first two dimensions exchanged: [S, B, ...] as [B, S, ...].
Tensor swapped(const Tensor& t);
// Copies the elements of one view to another of the same shape and dtype.
void copy_elements(const Tensor& from, const Tensor& to);
double l2_norm(const Tensor& t);

}  // namespace talea::cli
