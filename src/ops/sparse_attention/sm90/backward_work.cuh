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

// The chunks [first, last) of a part of a tile of keys.
template <int kFirst, int kSecond>
__device__ constexpr Part backward_part(int part) {
  constexpr int half = (kFirst + 1) / 2, rest = (kSecond + 1) / 2;
  const int base = part < 2 ? 0 : kFirst, cut = part < 2 ? half : rest;
  const int end = part < 2 ? kFirst : kFirst + kSecond;
  return part % 2 == 0 ? Part{base, base + cut} : Part{base + cut, end};
}

__device__ inline int tiles_of(int64_t slots) {
  return static_cast<int>((slots + tile_keys - 1) / tile_keys);
}

}  // namespace talea::sparse_attention::sm90
