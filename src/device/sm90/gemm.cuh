// What: a persistent matrix product on Hopper: one copy warp and two multiplying warpgroups a
// block, blocks in pairs that share the B tile.
// Why: an operator's epilogue sees the fp32 accumulators in registers.
// Never: knows what is computed from them: that is the Epilogue's.
//
//   C [M, N] = A [M, K] B [K, N]; a pair of blocks owns tiles of 2 kBlockM x kBlockN, half each
//
//   one thread (copy):                           two warpgroups (multiply):
//     for each tile of the pair, for each 64 of K:   for each tile (PingPong: every second one):
//       wait until stage s is empty in both blocks     acc [kGroupM, kBlockN] = 0
//       A [kBlockM, 64] -> stage s of this block       for each 64 of K:
//       half of B [64, kBlockN] -> stage s of both       wait until stage s is full
//                                                        acc += A B;  stage s - 1 is empty
//                                                      Epilogue::run(acc, row, column)
#pragma once
#include <concepts>
#include <cstddef>

#include "core/kernel_mutant.hpp"
#include "device/sm90/ptx.cuh"
#include "device/sm90/tile_order.cuh"
#include "device/sm90/wgmma.cuh"

namespace talea::sm90 {

// How an operand lies in memory: its K index contiguous, or its M (N) index.
enum class Major : int { k = 0, mn = 1 };

constexpr int kMultiplyingWarps = 8, kMultiplyingThreads = 32 * kMultiplyingWarps;
constexpr int kScratchWords = 16;

// PingPong: each warpgroup owns whole tiles and multiplies while the other runs its epilogue.
// Otherwise the two share a tile's rows.
template <int kBlockM_, int kBlockN_, int kStages_, bool kPingPong_, Major kMajorA_, Major kMajorB_,
          bool kF16_ = false, int kStagingBytes_ = 2048, int kAsideBytes_ = 0>
struct Shape {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = 64, kStages = kStages_;
  static constexpr bool kPingPong = kPingPong_;
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr bool kF16 = kF16_;  // the operands' dtype; otherwise bf16
  static constexpr int kCluster = 2;
  static constexpr int kThreads = 128 + kMultiplyingThreads;
  static constexpr int kGroupM = kPingPong ? kBlockM : kBlockM / 2;  // rows of one warpgroup
  static constexpr int kParts = kGroupM / 64;                        // m64 instructions
  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStagingBytes = kStagingBytes_;  // per multiplying warp
  static constexpr int kAsideBytes = kAsideBytes_;      // likewise, behind all else
  // Of a thread; an epilogue with memory aside needs all that there are.
  static constexpr int kCopyRegisters = kAsideBytes > 0 ? 24 : 40,
                       kMultiplyRegisters = kAsideBytes > 0 ? 240 : 232;
  static constexpr int kSharedBytes = kStages * (kBytesA + kBytesB) +
                                      kMultiplyingWarps * kStagingBytes + 2 * kStages * 8 +
                                      4 * kScratchWords + kMultiplyingWarps * kAsideBytes;
  // The B tile is loaded in two halves, one per block of the pair, and multicast.
  static constexpr bool kSplitBByK = kMajorB == Major::mn && (kBlockN / 64) % 2 != 0;
  static constexpr int kBoxRowsA = kMajorA == Major::k ? kBlockM : kBlockK;
  static constexpr int kBoxRowsB =
      kMajorB == Major::k ? kBlockN / kCluster : (kSplitBByK ? kBlockK / 2 : kBlockK);
};

// 64 rows of 64 16-bit elements, as TMA swizzles them: 128 bytes a row. Operands lie in such
// blocks.
constexpr int kSwizzledBlockBytes = 64 * 128;

// The shared memory of a block, in the order in which it lies; its start is aligned to 1024 bytes,
// as the swizzle asks.
template <class S>
struct SharedMemory {
  char a[S::kStages * S::kBytesA], b[S::kStages * S::kBytesB];  // stage by stage
  char staging[kMultiplyingWarps * S::kStagingBytes];           // warp by warp
  uint64_t full[S::kStages], empty[S::kStages];                 // mbarriers of the stages
  uint32_t scratch[kScratchWords];  // of the filter; or of the tickets, in launches that draw them
};

// Where its parts begin, in registers.
template <class S>
struct Pipeline {
  char *a, *b, *staging;
  uint64_t *full, *empty;

  __device__ explicit Pipeline(SharedMemory<S>& m)
      : a(m.a), b(m.b), staging(m.staging), full(m.full), empty(m.empty) {
    static_assert(sizeof m + kMultiplyingWarps * S::kAsideBytes == S::kSharedBytes);
  }
};

// Of the multiplying warp whose staging memory this is.
template <class S>
__device__ __forceinline__ char* aside_of(char* staging) {
  const int warp = static_cast<int>(threadIdx.x / 32) - 4;
  return staging - warp * S::kStagingBytes - offsetof(SharedMemory<S>, staging) +
         sizeof(SharedMemory<S>) + warp * S::kAsideBytes;
}

// Of the two warpgroups of a PingPong shape: whose turn it is to multiply. Barrier 0 is
// __syncthreads.
enum class NamedBarrier : int { turn_of_first = 1, turn_of_second = 2 };
__device__ __forceinline__ void await_turn(int group) {
  named_barrier_sync(static_cast<int>(NamedBarrier::turn_of_first) + group, kMultiplyingThreads);
}
__device__ __forceinline__ void hand_turn_to(int group) {
  named_barrier_arrive(static_cast<int>(NamedBarrier::turn_of_first) + group, kMultiplyingThreads);
}

struct StagePlace {
  int stage = 0;
  uint32_t phase = 0;
  template <class S>
  __device__ void advance(int by) {
    stage += by;
    phase ^= (stage / S::kStages) & 1;
    stage %= S::kStages;
  }
  template <class S>
  __device__ void next() {
    if (++stage == S::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// acc[part][4 j + 2 h + e] of a lane is row 64 part + lane / 4 + 8 h of the warp's 16 rows a part,
// column 8 j + 2 (lane % 4) + e.
template <class S>
using Accumulators = float[S::kParts][S::kBlockN / 2];

// What a product does with its tiles. Params: what the host says. Filter: pairs of row tiles that
// are left out, known before the roles part; it may use the scratch words. Then, of all threads:
// before (the operands are ready), after (at the end); of each multiplying warp: start, once;
// fetch, before a tile is multiplied; ready (the results of earlier kernels are), and run, after
// it. row: the first of the warp's 16 in part 0; staging: the warp's kStagingBytes.
template <class E, class S>
concept Epilogue =
    std::constructible_from<typename E::Filter, const typename E::Params&, int, uint32_t*> &&
    requires(const typename E::Params& p, const typename E::Filter& filter,
             const TileOrder<S>& work, Accumulators<S>& acc, int row, int column, char* staging) {
  { filter.skips(0) } -> std::same_as<bool>;
  { filter.none() } -> std::same_as<bool>;
  E::before(p), E::ready(p), E::after(p), E::start(staging);
  E::template fetch<S>(p, work, row, column, staging);
  E::template run<S>(acc, p, work, row, column, staging);
};

// ---- role: copy ------------------------------------------------------------------------------
template <class S>
__device__ void load_stage(const CUtensorMap& map_a, const CUtensorMap& map_b, const Pipeline<S>& p,
                           int stage, int row, int column, int k, int offset, uint32_t rank) {
  char *a = p.a + stage * S::kBytesA, *b = p.b + stage * S::kBytesB;
  uint64_t* full = &p.full[stage];
  if constexpr (S::kMajorA == Major::k) {
    load_tile(&map_a, full, a, k + offset, row);
  } else {
#pragma unroll
    for (int i = 0; i < S::kBlockM / 64; ++i)
      load_tile(&map_a, full, a + i * kSwizzledBlockBytes, row + offset + i * 64, k);
  }
  if constexpr (S::kMajorB == Major::k) {
    const int part = rank * (S::kBlockN / 2);
    load_tile_multicast(&map_b, full, b + part * 128, k, column + part, 3);
  } else if constexpr (S::kSplitBByK) {
#pragma unroll
    for (int i = 0; i < S::kBlockN / 64; ++i)
      load_tile_multicast(&map_b, full,
                          b + i * kSwizzledBlockBytes + rank * kSwizzledBlockBytes / 2,
                          column + i * 64, k + rank * 32, 3);
  } else {
#pragma unroll
    for (int i = 0; i < S::kBlockN / 128; ++i) {
      const int block = rank * (S::kBlockN / 128) + i;
      load_tile_multicast(&map_b, full, b + block * kSwizzledBlockBytes, column + block * 64, k, 3);
    }
  }
}

template <class S, Epilogue<S> E>
__device__ void copy_role(const CUtensorMap& map_a, const CUtensorMap& map_b, const Pipeline<S>& p,
                          const TileOrder<S>& work, const typename E::Filter& filter,
                          uint32_t rank) {
  StagePlace place;
  for (int w = work.first(); w < work.count(); w = work.next(w)) {
    if (filter.skips(work.pair(w))) continue;
    const int row = (work.pair(w) * 2 + rank) * S::kBlockM, column = work.tile(w) * S::kBlockN;
    for (int i = 0, k = 0, offset = 0; i < work.k_blocks; ++i) {
      barrier_wait(&p.empty[place.stage], place.phase ^ 1);
      barrier_expect(&p.full[place.stage], S::kBytesA + S::kBytesB);
      load_stage<S>(map_a, map_b, p, place.stage, work.a_begin + row, column, k * S::kBlockK,
                    offset, rank);
      place.template next<S>();
      if (++k == work.term_blocks) k = 0, offset += work.term_offset;
    }
  }
}

// ---- role: multiply --------------------------------------------------------------------------
template <class S>
__device__ __forceinline__ void multiply_stage(Accumulators<S>& acc, const char* a, const char* b) {
  constexpr int kTa = static_cast<int>(S::kMajorA), kTb = static_cast<int>(S::kMajorB);
  constexpr int kStepA = S::kMajorA == Major::k ? 32 : 2048;  // bytes per 16 of K
  constexpr int kStepB = S::kMajorB == Major::k ? 32 : 2048;
  const uint64_t da = operand_descriptor(a), db = operand_descriptor(b);
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
      multiply_tile<S::kBlockN, kTa, kTb, S::kF16>(
          acc[part], da + ((part * kSwizzledBlockBytes + k * kStepA) >> 4),
          db + ((k * kStepB) >> 4));
}

template <class S>
__device__ __forceinline__ void release(const Pipeline<S>& p, int stage) {
  const int thread = threadIdx.x % 128;
  if (thread < S::kCluster) barrier_arrive_at(&p.empty[stage], thread);
}

template <class S>
__device__ __forceinline__ void clear(Accumulators<S>& acc) {
#pragma unroll
  for (int part = 0; part < S::kParts; ++part)
#pragma unroll
    for (int i = 0; i < S::kBlockN / 2; ++i) {
      acc[part][i] = 0.f;
      asm volatile("" : "+f"(acc[part][i]));  // here, not where the compiler would like it
    }
}

// Adds to cleared accumulators. On return the last stage is still being multiplied: finish with
// drain().
template <class S>
__device__ __forceinline__ void multiply(Accumulators<S>& acc, const Pipeline<S>& p,
                                         StagePlace& place, int k_blocks, int group) {
  const int offset = S::kPingPong ? 0 : group * (S::kGroupM / 64) * kSwizzledBlockBytes;
  const bool early = mutant(KernelMutant::stage_released_early);
  int previous = 0;
  for (int i = 0; i < k_blocks; ++i) {
    barrier_wait(&p.full[place.stage], place.phase);
    if (early) {
      release<S>(p, place.stage);
      __nanosleep(4000);  // without it the product may win the race
    }
    warpgroup_arrive();
    multiply_stage<S>(acc, p.a + place.stage * S::kBytesA + offset, p.b + place.stage * S::kBytesB);
    warpgroup_commit();
    warpgroup_wait<1>();
    if (i > 0 && !early) release<S>(p, previous);
    previous = place.stage;
    place.template next<S>();
  }
}

template <class S>
__device__ __forceinline__ void drain(Accumulators<S>& acc, const Pipeline<S>& p,
                                      const StagePlace& place, int k_blocks) {
  warpgroup_wait<0>();
  // The accumulators are read only after the wait, whatever the compiler would like to move.
#pragma unroll
  for (int part = 0; part < S::kParts; ++part)
#pragma unroll
    for (int i = 0; i < S::kBlockN / 2; ++i) asm volatile("" : "+f"(acc[part][i])::"memory");
  if (k_blocks > 0 && !mutant(KernelMutant::stage_released_early))
    release<S>(p, place.stage == 0 ? S::kStages - 1 : place.stage - 1);
}

template <class S, Epilogue<S> E>
__device__ __forceinline__ void multiply_role(const Pipeline<S>& p, const TileOrder<S>& work,
                                              const typename E::Params& params,
                                              const typename E::Filter& filter, uint32_t rank) {
  const int group = threadIdx.x / 128 - 1, warp = (threadIdx.x % 128) / 32;
  char* staging = p.staging + (group * 4 + warp) * S::kStagingBytes;
  StagePlace place;
  int turn = 0;
  E::start(staging);
  if (S::kPingPong && group == 1) hand_turn_to(0);
  for (int w = work.first(); w < work.count(); w = work.next(w)) {
    if (filter.skips(work.pair(w))) continue;
    if (S::kPingPong && (turn++ & 1) != group) {
      place.advance<S>(work.k_blocks);
      continue;
    }
    const int row = (work.pair(w) * 2 + rank) * S::kBlockM +
                    (S::kPingPong ? 0 : group * S::kGroupM) + warp * 16;
    Accumulators<S> acc;
    clear<S>(acc);  // while the other group multiplies
    E::template fetch<S>(params, work, row, work.tile(w) * S::kBlockN, staging);
    if constexpr (S::kPingPong) await_turn(group);
    multiply<S>(acc, p, place, work.k_blocks, group);
    if constexpr (S::kPingPong) hand_turn_to(1 - group);
    drain<S>(acc, p, place, work.k_blocks);
    E::ready(params);
    E::template run<S>(acc, params, work, row, work.tile(w) * S::kBlockN, staging);
  }
  // Every turn handed over is taken: the group whose turn comes next takes it without a tile.
  if (S::kPingPong && (turn & 1) == group) await_turn(group);
  if (threadIdx.x % 32 == 0) store_wait_all();
}

template <class S, Epilogue<S> E>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(S::kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b, const __grid_constant__ Extents extents,
                const __grid_constant__ typename E::Params params) {
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<SharedMemory<S>*>(raw);
  const Pipeline<S> pipeline(shared);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], S::kCluster * (S::kPingPong ? 1 : 2));
    }
    barrier_init_fence();
  }
  E::before(params);
  TileOrder<S> work(extents);
  const typename E::Filter filter(params, work.rows, shared.scratch);
  cluster_sync();
  if (extents.tickets) {
    uint32_t* place = shared.scratch;
    if (rank == 0 && threadIdx.x == 0) {
      const uint32_t drawn = atomicAdd(extents.tickets, 1);
      shared_store_at(place, 0, drawn);
      shared_store_at(place, 1, drawn);
    }
    cluster_sync();
    work.place = static_cast<int>(*place);
  }
  if (filter.none()) {
    // Nothing to multiply: no loop over tiles to find that out.
  } else if (threadIdx.x < 128) {
    lower_registers<S::kCopyRegisters>();
    if (threadIdx.x == 0) copy_role<S, E>(map_a, map_b, pipeline, work, filter, rank);
  } else {
    raise_registers<S::kMultiplyRegisters>();
    multiply_role<S, E>(pipeline, work, params, filter, rank);
  }
  __syncwarp();
  E::after(params);
  cluster_sync();  // no block leaves while its pair may still write to it or signal it
}

// No tile is skipped.
struct EveryTile {
  template <class P>
  __device__ EveryTile(const P&, int, uint32_t*) {}
  __device__ bool skips(int) const { return false; }
  __device__ bool none() const { return false; }
};

// What an epilogue does before its tiles: nothing, unless it reads what it adds to.
struct ReadsNothing {
  static __device__ __forceinline__ void start(char*) {}
  template <class S, class P>
  static __device__ __forceinline__ void fetch(const P&, const TileOrder<S>&, int, int, char*) {}
};

// When a product waits for the kernels before it, whose end it may have been launched ahead of.
// Every product waits somewhere, so that the end of one means the end of all before it.
struct WaitsFirst : ReadsNothing {  // its operands come from them
  template <class P>
  static __device__ __forceinline__ void before(const P&) {
    begin_after_earlier_kernels();
  }
  template <class P>
  static __device__ __forceinline__ void ready(const P&) {}
  template <class P>
  static __device__ __forceinline__ void after(const P&) {}
};
struct WaitsForResults : ReadsNothing {  // only its epilogue reads or overwrites what is theirs
  template <class P>
  static __device__ __forceinline__ void before(const P&) {
    let_later_kernels_start();
  }
  template <class P>
  static __device__ __forceinline__ void ready(const P&) {
    wait_for_earlier_kernels();
  }
  template <class P>
  static __device__ __forceinline__ void after(const P&) {
    wait_for_earlier_kernels();
  }
};
struct WaitsLast
    : ReadsNothing {  // it reads what the product before it reads, and writes what nobody reads
  template <class P>
  static __device__ __forceinline__ void before(const P&) {
    let_later_kernels_start();
  }
  template <class P>
  static __device__ __forceinline__ void ready(const P&) {}
  template <class P>
  static __device__ __forceinline__ void after(const P&) {
    wait_for_earlier_kernels();
  }
};

}  // namespace talea::sm90
