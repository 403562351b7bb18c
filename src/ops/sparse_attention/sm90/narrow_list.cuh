// What: the list of a block of narrow.cuh: what its query brings, and the rows that its slots name.
// Why: an index is read a pair of tiles ahead of its row, and a row is one word to share.
// Never: names a row that no valid slot does.
#pragma once

#include "ops/sparse_attention/sm90/narrow_shape.cuh"
#include "ops/sparse_attention/sm90/produce.cuh"

namespace talea::sparse_attention::sm90 {

// A lane has a slot of each pair.
template <class S>
struct NarrowSlots {
  const Forward& f;
  const int thread;
  int slot = 0, index = -1, index_high = 0;  // of the next pair, and what stands there

  __device__ static NarrowList& list() { return S::beside().list; }

  // Whether a list is as long as any and names all rows: what its query brings need not be read.
  __device__ bool is_plain() const {
    const cuda::Tables& t = f.tables;
    return key_range({}, {}).known && t.rule.space == IndexSpace::rows && !t.rule.causal &&
           !t.has_block_table && t.sequences == 0 && !t.topk_length.present && !f.counters;
  }
  // By one thread.
  __device__ void open(const Work& w) {
    const cuda::Tables& t = f.tables;
    NarrowList& l = list();
    const bool counts = f.counters && w.tile == 0;
    if (is_plain()) {
      l.query.batch = w.b;
      l.query.slots = t.slots;
      l.range = {true, 0, t.rule.keys, 0};
    } else {
      l.query = cuda::query_rule(t, w.b, w.s);
      l.range = key_range(t.rule, l.query);
      if (counts) l.range.known = false;
    }
    l.slots = static_cast<int>(l.query.slots);
    l.pairs = w.heads > 0 || counts ? pairs_of(l.query.slots) : 0;
    l.indices = static_cast<const char*>(t.indices.data) +
                cuda::offset(t.indices, w.b, w.s, w.g) * (t.indices.dtype == DType::i32 ? 4 : 8);
    const auto bound = [](int64_t x) {
      return static_cast<int>(min(max(x, int64_t{0}), int64_t{0x7fffffff}));
    };
    l.low = bound(l.range.low), l.high = bound(l.range.high);
    l.key_stride = static_cast<uint32_t>(f.kv.stride[1] / 8);
    l.keys = static_cast<uint32_t>(cuda::offset(f.kv, l.query.batch, l.range.shift, w.g) / 8);
    l.b = static_cast<int>(w.b), l.s = static_cast<int>(w.s), l.g = static_cast<int>(w.g);
    l.head = w.head, l.heads = w.heads;
  }
  __device__ static Work work() {
    const NarrowList& l = list();
    Work w;
    w.b = l.b, w.s = l.s, w.g = l.g, w.head = l.head, w.heads = l.heads;
    return w;
  }

  __device__ void begin() {
    slot = slot_of_lane(thread / 32, thread % 32);
    read_index();
  }
  __device__ void read_index() {
    const NarrowList& l = list();
    index = -1;
    if (slot >= l.slots) return;
    const View& v = f.tables.indices;
    const int64_t at = slot * v.stride[3];
    if (v.dtype == DType::i32) {
      index = reinterpret_cast<const int32_t*>(l.indices)[at];
    } else {
      const int2 x = reinterpret_cast<const int2*>(l.indices)[at];
      index = x.x, index_high = x.y;
    }
  }
  // The row of a slot as the rule finds it, in 16 bytes; foreign indices are counted where asked.
  __device__ bool find_row(uint32_t& row) const {
    const NarrowList& l = list();
    if (slot >= l.slots) return false;
    const View& v = f.tables.indices;
    const int64_t at = slot * v.stride[3];
    const int64_t number = v.dtype == DType::i32 ? reinterpret_cast<const int32_t*>(l.indices)[at]
                                                 : reinterpret_cast<const int64_t*>(l.indices)[at];
    const KeyRow found = find_key(f.tables.rule, l.query, slot, number);
    if (f.counters && found.kind == SlotKind::foreign) {
      const Work w = narrow_work(f);
      if (w.tile == 0) cuda::count(f.tables, f.counters, w.b, w.s, w.g, slot);
    }
    if (found.kind != SlotKind::valid) return false;
    row = static_cast<uint32_t>(cuda::offset(f.kv, found.outer, found.inner, l.g) / 8);
    return true;
  }
  // This lane's row of the next pair, in 16 bytes; there: a bit a lane, whether it has one.
  __device__ uint32_t next_row(uint32_t& there) {
    const NarrowList& l = list();
    uint32_t row = 0;
    bool found;
    if (l.range.known) {
      found = index_high == 0 && index >= l.low && index < l.high;
      if (found) row = l.keys + static_cast<uint32_t>(index) * l.key_stride;
      slot += 2 * tile_keys;
      read_index();
    } else {
      found = find_row(row);
      slot += 2 * tile_keys;
    }
    there = __ballot_sync(~0u, found);
    return row;
  }
};

}  // namespace talea::sparse_attention::sm90
