// What: a world of calls in phases, driven by one loop on one thread.
// Why: every operator's phases must give bit for bit what a communicator gives.
// Never: lets a rank run beside another: the loop is the only one that moves bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "talea/phases.hpp"

namespace talea::testing {

template <typename T>
void sum_into(void* to, const std::vector<const char*>& from, int64_t count) {
  std::vector<T> sum(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = reinterpret_cast<const T*>(from[0])[i];
    for (size_t r = 1; r < from.size(); ++r) sum[i] += reinterpret_cast<const T*>(from[r])[i];
  }
  std::memcpy(to, sum.data(), sum.size() * sizeof(T));
}

// What a process group does, for all its ranks at once. Sums run in rank order.
inline void perform(const std::vector<const Exchange*>& all) {
  const int ranks = static_cast<int>(all.size());
  const Exchange& e = *all[0];
  ASSERT_GT(e.bytes, 0);
  const auto bytes = static_cast<size_t>(e.bytes);
  for (const Exchange* other : all) {
    ASSERT_EQ(other->kind, e.kind);
    ASSERT_EQ(other->bytes, e.bytes);
    ASSERT_EQ(other->group, e.group);
  }
  std::vector<std::vector<char>> sent;
  for (const Exchange* from : all) {
    const size_t blocks = e.kind == ExchangeKind::reduce_scatter_sum ? ranks : 1;
    const char* data = static_cast<const char*>(from->send);
    sent.emplace_back(data, data + blocks * bytes);
  }
  for (int to = 0; to < ranks; ++to) {
    if (e.kind == ExchangeKind::all_gather) {
      for (int r = 0; r < ranks; ++r)
        std::memcpy(static_cast<char*>(all[to]->recv) + r * bytes, sent[r].data(), bytes);
      continue;
    }
    std::vector<const char*> parts;
    const size_t block = e.kind == ExchangeKind::reduce_scatter_sum ? to : 0;
    for (const auto& s : sent) parts.push_back(s.data() + block * bytes);
    if (e.dtype == DType::f64)
      sum_into<double>(all[to]->recv, parts, e.count);
    else if (e.dtype == DType::f32)
      sum_into<float>(all[to]->recv, parts, e.count);
    else
      FAIL() << "a sum of " << name_of(e.dtype);
  }
}

using Calls = std::vector<std::unique_ptr<Phases>>;

// The exchanges of a world driven to its end.
inline int64_t drive(Calls& calls) {
  for (int64_t exchanges = 0;; ++exchanges) {
    std::vector<const Exchange*> all;
    for (auto& call : calls) all.push_back(call->next());
    if (!all[0]) {
      for (const Exchange* e : all) EXPECT_EQ(e, nullptr);
      return exchanges;
    }
    perform(all);
  }
}

}  // namespace talea::testing
