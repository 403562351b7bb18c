// What: the passes of lane reference, and where their rows lie.
// Why: attention and the indexer each have a file of their own; both keep to the workspace.
// Never: included by another lane.
#pragma once

#include <algorithm>

#include "core/arena.hpp"
#include "ops/sparse_attention/rows.hpp"

namespace talea::sparse_attention::reference {

// A vector in the workspace: it holds what it was laid out for, and no more.
template <typename T>
class List {
 public:
  List(Arena& arena, int64_t most) : data_(arena.take<T>(most)), most_(static_cast<size_t>(most)) {}

  T* data() const { return data_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) const { return data_[i]; }
  void clear() { size_ = 0; }
  void push_back(const T& value) {
    resize(size_ + 1);
    data_[size_ - 1] = value;
  }
  void resize(size_t size) {
    require(size <= most_, ErrorKind::runtime, "lane reference: {} entries where {} were laid out",
            size, most_);
    size_ = size;
  }
  void assign(size_t size, const T& value) {
    resize(size);
    std::fill(begin(), end(), value);
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0, most_ = 0;
};

void forward(const Call& c);
void backward(const Call& c);
void select(const Call& c);
void index_loss(const Call& c);

// What the pass of the problem takes of the workspace.
int64_t attention_bytes(const Problem& p);
int64_t index_bytes(const Problem& p);

}  // namespace talea::sparse_attention::reference
