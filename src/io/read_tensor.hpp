// What: one command line argument -> one tensor.
// Why: FILE.npy, FILE.safetensors and FILE.safetensors:KEY mean the same in every subcommand.
// Never: guesses a format from the content.
#pragma once

#include <string>

#include "io/host_tensor.hpp"

namespace talea::io {

struct TensorArgument {
  std::string path;
  std::string key;  // empty: none given
  bool safetensors = false;
};

// Error(usage) naming the argument when it is neither form.
TensorArgument parse_tensor_argument(const std::string& argument);

HostTensor read_tensor(const std::string& argument);

}  // namespace talea::io
