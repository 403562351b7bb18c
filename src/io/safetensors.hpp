// What: reads and writes .safetensors files.
// Why: named tensors, bf16 included, in one file of a format without code.
// Never: trusts an offset: the tensors must tile the data section exactly.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/host_tensor.hpp"
#include "io/source.hpp"

namespace talea::io {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file spells it; may be one that we do not read
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes within the data section
};

class SafetensorsFile {
 public:
  // Reads and checks the header. Error(invalid_data) names file and field.
  explicit SafetensorsFile(Source source);
  explicit SafetensorsFile(const std::string& path);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // by offset
  // An empty key names the only tensor of a file of one.
  HostTensor read(const std::string& key) const;

 private:
  const SafetensorsEntry& find(const std::string& key) const;

  Source source_;
  int64_t data_begin_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// Row-major, in the given order, atomic. Names must differ and not be empty or __metadata__.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata = {});

}  // namespace talea::io
