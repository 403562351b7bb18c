// What: any bytes as a .safetensors file; every tensor it names is read.
// Why: the reader must end in tensors or in Error(invalid_data), nothing else.
// Never: touches a file.
#include <cstdlib>

#include "io/safetensors.hpp"
#include "talea/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace talea;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const io::SafetensorsFile file(io::Source::memory("fuzz.safetensors", bytes));
    int64_t total = 0;
    for (const io::SafetensorsEntry& entry : file.entries()) {
      total += entry.end - entry.begin;
      if (total > static_cast<int64_t>(size)) std::abort();  // overlaps, or more than there is
      try {
        io::tensor_sha256(file.read(entry.name).view);
      } catch (const Error& error) {  // a dtype that is not read
        if (error.kind() != ErrorKind::invalid_data) std::abort();
      }
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_data) std::abort();
  }
  return 0;
}
