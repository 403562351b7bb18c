// What: names and places of a model's parameters inside one flat buffer.
// Why: optimizer, comparison, checkpoint and exchange walk one array; names are for people.
// Never: owns parameter memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace talea::train {

struct Slice {
  std::string name;
  int64_t offset = 0;
  int64_t rows = 1;
  int64_t columns = 0;
  double init_scale = 0;  // standard deviation of the initial values; 0: all ones (a norm's gain)

  int64_t size() const { return rows * columns; }
};

class Layout {
 public:
  // Returns the offset of the new slice.
  int64_t add(std::string name, int64_t rows, int64_t columns, double init_scale) {
    slices_.push_back({std::move(name), size_, rows, columns, init_scale});
    size_ += rows * columns;
    return slices_.back().offset;
  }

  const std::vector<Slice>& slices() const { return slices_; }
  int64_t size() const { return size_; }

 private:
  std::vector<Slice> slices_;
  int64_t size_ = 0;
};

}  // namespace talea::train
