// What: of a block of narrow.cuh its sizes, where its tiles lie in shared memory, and its work.
// Why: addresses that stand in the instructions take none to form.
// Never: an address before the kernel has asked whether shared memory begins where it is assumed.
#pragma once

#include "device/sm90/ptx.cuh"
#include "ops/sparse_attention/sm90/work.cuh"

namespace talea::sparse_attention::sm90 {

extern __shared__ __align__(1024) char narrow_memory[];
inline constexpr uint32_t narrow_begin = 1024;

// kColumns: chunks of a row. kSteps: sixteens of the last one, two where it has no more, else four.
// kWide: chunks of values, two instead of one. kRows: heads of a thread; 1 for up to 32 heads,
// eight of a warp.
template <int kColumns, int kSteps, bool kWide, int kRows, bool kF16>
struct NarrowShape {
  static constexpr int columns = kColumns, steps = kSteps, rows = kRows;
  static constexpr bool wide = kWide, f16 = kF16;
  static constexpr NarrowPlan plan = narrow_plan(kColumns, kWide, kRows == 1);
  // Tiles are filled while products that read others are queued.
  static constexpr bool early = !kWide || plan.spare;
  static constexpr int half = 64, halves = kWide ? 2 : 1;  // of the values, 64 columns each

  __device__ static char* memory() {
    return static_cast<char*>(__cvta_shared_to_generic(narrow_begin));
  }
  __device__ static NarrowBeside& beside() {
    return *reinterpret_cast<NarrowBeside*>(memory() + plan.bytes);
  }
  __device__ static uint64_t operand(uint32_t at) {
    return talea::sm90::operand_descriptor(memory()) + (at >> 4);
  }
  // Bytes to chunk c of tile kTile of a pair.
  template <int kTile>
  __device__ static uint32_t chunk_at(int c, int pair) {
    const uint32_t home = plan.keys_at + (kTile * kColumns + c) * chunk_bytes;
    if (!plan.spare || kTile != 0 || c != 1) return home;
    return pair & 1 ? plan.spare_at : home;
  }
  // The head of a thread's row i, of the work's.
  __device__ static int head(int thread, int i) {
    const int warp = thread / 32, line = thread % 32 / 4 + 8 * i;
    if (kRows == 2) return warp * 16 + line;
    return line < 8 ? warp * 8 + line : tile_heads;
  }
};

// As work_of(), of fewer than 2^31 works; the divisions that a call needs.
__device__ inline Work narrow_work(const Forward& f) {
  Work w;
  uint32_t rest = blockIdx.x;
  const auto divide = [&rest](int64_t by) {  // the remainder
    if (by == 1) return 0u;
    const uint32_t number = rest;
    rest = number / static_cast<uint32_t>(by);
    return number - rest * static_cast<uint32_t>(by);
  };
  w.tile = static_cast<int>(divide(f.head_tiles));
  w.g = divide(f.tables.groups);
  w.s = rest;
  w.b = 0;
  if (rest >= f.tables.queries) w.s = divide(f.tables.queries), w.b = rest;
  const int64_t begin = w.g * f.group_heads - f.head_begin;
  const int64_t first = begin > 0 ? begin : 0;
  const int64_t last = min(begin + f.group_heads, f.heads);
  w.head = first + w.tile * tile_heads;
  w.heads = static_cast<int>(min(last - w.head, int64_t{tile_heads}));
  return w;
}

}  // namespace talea::sparse_attention::sm90
