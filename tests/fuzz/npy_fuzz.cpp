// What: any bytes as a .npy file.
// Why: the reader must end in a tensor or in Error(invalid_data), nothing else.
// Never: touches a file.
#include <cstdlib>

#include "core/half.hpp"
#include "io/npy.hpp"
#include "talea/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace talea;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const io::HostTensor t = io::read_npy(io::Source::memory("fuzz.npy", bytes));
    if (t.bytes() > static_cast<int64_t>(size)) std::abort();  // more than the file backs
    io::tensor_sha256(t.view);                                 // touches every element
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_data) std::abort();
  }
  return 0;
}
