// What: the FILE[:KEY] grammar and the choice of reader.
// Why: a key may hold dots, slashes and colons; only ".safetensors:" separates.
// Never: touches the file before the argument is understood.
#include "io/read_tensor.hpp"

#include "core/fail.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace talea::io {

TensorArgument parse_tensor_argument(const std::string& argument) {
  constexpr std::string_view extension = ".safetensors";
  if (const size_t at = argument.find(".safetensors:"); at != std::string::npos) {
    const size_t colon = at + extension.size();
    require(colon + 1 < argument.size(), ErrorKind::usage, "{}: no key after ':'", argument);
    return {argument.substr(0, colon), argument.substr(colon + 1), true};
  }
  if (argument.ends_with(extension)) return {argument, "", true};
  require(argument.find(".npy:") == std::string::npos, ErrorKind::usage,
          "{}: a .npy file holds one tensor and takes no key", argument);
  require(argument.ends_with(".npy"), ErrorKind::usage,
          "{}: neither FILE.npy nor FILE.safetensors[:KEY]", argument);
  return {argument, "", false};
}

HostTensor read_tensor(const std::string& argument) {
  const TensorArgument parsed = parse_tensor_argument(argument);
  return parsed.safetensors ? SafetensorsFile(parsed.path).read(parsed.key) : read_npy(parsed.path);
}

}  // namespace talea::io
