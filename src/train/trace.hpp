// What: the tensors of one step in the order in which they were computed.
// Why: the localiser names the first stage and tensor in which two runs differ.
// Never: costs anything when absent: every recorder takes a null pointer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace talea::train {

struct Trace {
  struct Entry {
    std::string name;
    std::vector<double> values;
  };
  std::vector<Entry> entries;
  std::string prefix;  // e.g. "micro 3: "

  template <typename T>
  void add(const std::string& name, const T* data, int64_t count) {
    entries.push_back({prefix + name, std::vector<double>(data, data + count)});
  }
};

template <typename T>
void record(Trace* trace, const std::string& name, const T* data, int64_t count) {
  if (trace) trace->add(name, data, count);
}

}  // namespace talea::train
