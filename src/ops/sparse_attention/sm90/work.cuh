// What: which query and heads a turn of a block has, and where its tiles lie.
// Why: the three warpgroups of a block walk through the same turns, each for itself.
// Never: reads a tensor.
#pragma once

#include "ops/sparse_attention/sm90/tile.hpp"

namespace talea::sparse_attention::sm90 {

// One query, one group of heads, 64 of them at most.
struct Work {
  int64_t b = 0, s = 0, g = 0;
  int tile = 0;      // of the group's heads
  int segment = 0;   // of its list
  int64_t head = 0;  // first, local
  int heads = 0;     // how many; 0 or less: none of this rank
};

__device__ inline Work work_of(const Forward& f, int64_t number) {
  Work w;
  w.tile = static_cast<int>(number % f.head_tiles);
  int64_t rest = number / f.head_tiles;
  w.segment = static_cast<int>(rest % f.segments);
  rest /= f.segments;
  w.g = rest % f.tables.groups;
  rest /= f.tables.groups;
  w.s = rest % f.tables.queries;
  w.b = rest / f.tables.queries;
  const int64_t begin = w.g * f.group_heads - f.head_begin;
  const int64_t first = begin > 0 ? begin : 0;
  const int64_t last = min(begin + f.group_heads, f.heads);
  w.head = first + w.tile * tile_heads;
  w.heads = static_cast<int>(min(last - w.head, int64_t{tile_heads}));
  return w;
}

// Tiles are taken two at a time, one a warpgroup; the second may be all absent.
__device__ inline int pairs_of(int64_t slots) {
  return static_cast<int>((slots + 2 * tile_keys - 1) / (2 * tile_keys));
}

// Of a work's segment; its first slot.
__device__ inline int pairs_of(const Forward& f, const Work& w, int64_t slots) {
  const int all = pairs_of(slots);
  return f.segments == 1 ? all : all > w.segment ? 1 : 0;
}
__device__ inline int64_t first_slot(const Work& w) { return int64_t{w.segment} * 2 * tile_keys; }

// The chunks [first, last) of a part of a tile; a part may be empty.
struct Part {
  int first, last;
};
template <int kHalf>
__device__ inline Part part_of(const TilePlan& plan, int part) {
  constexpr int count = 2 * parts_of_half(kHalf), each = 2 * kHalf / chunk_columns / count;
  const int first = min(part * each, plan.columns);
  return {first, part + 1 == count ? plan.columns : min(first + each, plan.columns)};
}

// Shared memory: q, two tiles of keys a pair of the ring, weights, what lies beside.
struct Tiles {
  char* base;
  TilePlan plan;
  // Pairs are numbered through all works of a block. Which place of the ring one has, and which
  // phase of its barriers.
  __device__ uint32_t place(uint32_t pair) const { return pair & (plan.ring - 1); }
  __device__ uint32_t phase(uint32_t pair) const { return pair >> (plan.ring - 1) & 1; }
  __device__ uint32_t keys_at(int tile, uint32_t pair = 0) const {
    return static_cast<uint32_t>((plan.columns + (2 * place(pair) + tile) * plan.keys) *
                                 chunk_bytes);
  }
  __device__ char* keys(int tile, uint32_t pair = 0) const { return base + keys_at(tile, pair); }
  __device__ char* weights(int tile, uint32_t pair = 0) const {
    if (tile == 0 && !plan.apart) return keys(1, pair) - chunk_bytes;
    return base + (plan.columns + 2 * plan.ring * plan.keys + place(pair) * (plan.apart ? 2 : 1) +
                   (1 - tile)) *
                      chunk_bytes;
  }
  __device__ Beside& beside() const {
    return *reinterpret_cast<Beside*>(base + chunks_of(plan) * chunk_bytes);
  }
  // What barriers and masks a pair has; the rest is that of the first alone, which a caller has in
  // registers.
  __device__ Beside& at(Beside& first, uint32_t pair) const { return (&first)[place(pair)]; }
  __device__ static bool writes_rows() { return true; }
  __device__ static int first_column(int group, int half) { return group * half; }
};

// A few stages of a pair's weights and a slice of its values; what lies beside.
struct StoredTiles {
  char* base;
  int slice, half;  // of the columns
  __device__ char* stage(uint32_t pair) const {
    return base + pair % stored_stages * stored_stage_bytes;
  }
  __device__ char* weights(uint32_t pair, int tile) const {
    return stage(pair) + tile * chunk_bytes;
  }
  __device__ float2 part(uint32_t pair, int tile, int thread) const {
    return reinterpret_cast<const float2*>(stage(pair) + weight_parts_at)[tile * 128 + thread];
  }
  __device__ float2 reference(uint32_t pair, int tile, int thread) const {
    return reinterpret_cast<const float2*>(stage(pair) +
                                           weight_references_at)[(tile * 128 + thread) / 4];
  }
  // Of the four warps that weighed a tile.
  __device__ uint32_t flags(uint32_t pair, int tile) const {
    const uint4 x = reinterpret_cast<const uint4*>(stage(pair) + weight_flags_at)[tile];
    return x.x | x.y | x.z | x.w;
  }
  __device__ float2 top(uint32_t pair, int thread) const {
    return reinterpret_cast<const float2*>(stage(pair) + weight_top_at)[thread / 4];
  }
  __device__ char* values(uint32_t pair, int tile, int group) const {
    return stage(pair) + weighed_bytes + tile * slice_bytes + group * (slice_bytes / 2);
  }
  __device__ StoredBeside& all() const {
    return *reinterpret_cast<StoredBeside*>(base + stored_stages * stored_stage_bytes);
  }
  __device__ uint64_t* full(uint32_t pair) const { return &all().full[pair % stored_stages]; }
  __device__ uint64_t* empty(uint32_t pair) const { return &all().empty[pair % stored_stages]; }
  __device__ bool writes_rows() const { return slice == 0; }
  __device__ int first_column(int group, int) const { return group * half + slice * slice_columns; }
};

}  // namespace talea::sparse_attention::sm90
