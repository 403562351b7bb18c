// What: where the tiles of lane sm90's backward pass lie in shared memory.
// Why: the warpgroup that fills them and the two that multiply walk through the same tiles.
// Never: reads a tensor.
#pragma once

#include "ops/sparse_attention/sm90/backward_tile.hpp"
#include "ops/sparse_attention/sm90/work.cuh"

namespace talea::sparse_attention::sm90 {

template <int kFirst, int kSecond>
struct BackwardTiles {
  static constexpr BackwardChunks chunks = {kFirst, kSecond};
  static constexpr int columns = chunks.all(), values = chunks.values();
  char* base;
  __device__ char* queries() const { return base; }
  __device__ char* keys() const { return base + columns * chunk_bytes; }
  __device__ char* weights() const { return base + 2 * columns * chunk_bytes; }  // P
  __device__ char* slopes() const { return weights() + chunk_bytes; }            // dS
  __device__ char* upstream() const { return slopes() + chunk_bytes; }           // d_o
  __device__ BackwardBeside& beside() const {
    return *reinterpret_cast<BackwardBeside*>(upstream() + values * chunk_bytes);
  }
};

// A third of a warpgroup's chunks, which it releases together. Parts are filled in their order:
// warpgroup 1 releases its own late where it adds up dkv (kAdds), else with those of the other.
constexpr int thirds = backward_parts / 2;
template <bool kAdds>
__device__ constexpr int part_number(int group, int third) {
  return kAdds ? group * thirds + third : third * 2 + group;
}
template <int kFirst, int kSecond>
__device__ constexpr Part third_of(int group, int third) {
  const int count = group == 0 ? kFirst : kSecond, begin = group == 0 ? 0 : kFirst;
  return {begin + (count * third + thirds - 1) / thirds,
          begin + (count * (third + 1) + thirds - 1) / thirds};
}
template <int kFirst, int kSecond, bool kAdds>
__device__ constexpr Part backward_part(int part) {
  return kAdds ? third_of<kFirst, kSecond>(part / thirds, part % thirds)
               : third_of<kFirst, kSecond>(part % 2, part / 2);
}

__device__ inline int tiles_of(int64_t slots) {
  return static_cast<int>((slots + tile_keys - 1) / tile_keys);
}

}  // namespace talea::sparse_attention::sm90
