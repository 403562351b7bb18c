// What the targets say: the rows that count, their order, the denominator.
// Exists so that ignored rows cost nothing and leak nothing, without the host knowing their number.
// Never depends on timing: every order is the order of the tokens.
#include <bit>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "device/sm90/follow.cuh"
#include "ops/linear_cross_entropy/sm90/target_rule.cuh"

namespace talea::lce {
namespace {

constexpr int kBlock = 1024;
constexpr int kFewBlock = static_cast<int>(kFewTokens);

__device__ void write_row(const CompactParams& p, int place, int64_t t, int64_t target) {
  const int64_t local = target - p.rule.vocab_begin;
  const bool here = p.rule.targets.data && local >= 0 && local < p.rule.vocab_local;
  p.rows.index[place] = static_cast<int>(t);
  p.rows.target[place] = here ? static_cast<int>(local) : -1;
  p.rows.peak[place] = kNoPeak;
  p.rows.target_logit[place] = -INFINITY;
  p.rows.shift[place] = p.token_shift ? p.token_shift[t] : 0.f;
  if (p.rows.scale) p.rows.scale[place] = static_cast<float>(read(p.rule.token_scale, t, 1));
  p.row_class_weight[place] =
      p.rule.targets.data ? static_cast<float>(read(p.class_weight, target, 1)) : 1.f;
  if (p.sort_keys) {
    const uint64_t key = here ? static_cast<uint64_t>(local) : 0xffffffffu;
    const bool rows = !mutant(KernelMutant::sort_by_word_alone);
    p.sort_keys[place] = key << 32 | static_cast<uint32_t>(rows ? place : 0);
  }
}

// What one thread, then the block, has seen of the batch.
struct Seen {
  int poisoned = 0, ignored = 0, in_partition = 0, bad = INT_MAX, bad_scale = INT_MAX;
  double valid = 0, weighted = 0;

  __device__ Seen operator+(const Seen& o) const {
    Seen s;
    s.poisoned = poisoned + o.poisoned, s.ignored = ignored + o.ignored;
    s.in_partition = in_partition + o.in_partition;
    s.bad = min(bad, o.bad), s.bad_scale = min(bad_scale, o.bad_scale);
    s.valid = valid + o.valid, s.weighted = weighted + o.weighted;
    return s;
  }

  __device__ void add(const CompactParams& p, int64_t t, TokenKind kind, int64_t target) {
    ignored += kind == TokenKind::ignored;
    poisoned += kind == TokenKind::poisoned;
    if (kind == TokenKind::poisoned) {
      int& first = scale_is_bad(p.rule, t) && target_is_fine(p.rule, t) ? bad_scale : bad;
      first = min(first, static_cast<int>(t));
    }
    if (kind == TokenKind::ignored) return;
    double c = 1;
    if (mutant(Mutant::b24_invalid_leaves_denominator) && kind == TokenKind::poisoned) c = 0;
    if (kind == TokenKind::valid && p.rule.targets.data) {
      c = read(p.class_weight, target, 1);
      const int64_t local = target - p.rule.vocab_begin;
      in_partition += local >= 0 && local < p.rule.vocab_local;
    }
    valid += c;
    weighted += c != 0 ? c * read(p.token_weight, t, 1) : c;
  }
};

template <int kThreads, class T, class Op>
__device__ T over_block(T value, Op op) {
  using Reduce = cub::BlockReduce<T, kThreads>;
  __shared__ typename Reduce::TempStorage shared;
  const T all = Reduce(shared).Reduce(value, op);
  __syncthreads();
  return all;
}

__device__ void set_denominator(BatchFacts& facts, int denominator, double given) {
  facts.denominator = denominator == 3   ? 1.0
                      : denominator == 2 ? given
                                         : facts.weights[denominator];
  facts.empty = facts.weights[2] == 0;
  // A class weight out of contract reaches the gradient of every reduction.
  facts.inverse = facts.first_bad_weight >= 0 ? static_cast<double>(NAN)
                  : facts.valid == 0          ? 0.0
                                              : 1.0 / facts.denominator;
}

// One block: the batch is a few thousand tokens and the order of the sums must not change.
template <int kThreads>
__device__ void compact(const CompactParams& p) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  int used = 0;
  Seen seen;
  for (int64_t base = 0; base < p.tokens; base += kThreads) {
    const int64_t t = base + threadIdx.x;
    const bool exists = t < p.tokens;
    const TokenKind kind = exists ? kind_of(p.rule, t) : TokenKind::ignored;
    const int64_t target = exists && p.rule.targets.data ? read_index(p.rule.targets, t) : -1;
    int place = 0, total = 0;
    Scan(scan).ExclusiveSum(kind == TokenKind::valid ? 1 : 0, place, total);
    __syncthreads();
    if (kind == TokenKind::valid) write_row(p, used + place, t, target);
    if (exists) seen.add(p, t, kind, target);
    used += total;
  }
  if (p.sort_keys)
    for (int64_t i = used + threadIdx.x; i < p.tokens; i += kThreads) p.sort_keys[i] = ~uint64_t{0};
  BatchFacts facts;
  facts.valid = used;
  const Seen all = over_block<kThreads>(seen, [](const Seen& x, const Seen& y) { return x + y; });
  facts.poisoned = all.poisoned;
  facts.ignored = all.ignored;
  facts.in_partition = all.in_partition;
  facts.first_bad = all.bad;
  facts.first_bad_scale = all.bad_scale;
  facts.weights[0] = all.valid;
  facts.weights[1] = all.weighted;
  if (threadIdx.x != 0) return;
  facts.weights[2] = static_cast<double>(facts.valid) + facts.poisoned;
  facts.first_bad_value = facts.first_bad != INT_MAX && p.rule.targets.data
                              ? read_index(p.rule.targets, facts.first_bad)
                              : 0;
  facts.first_bad_weight = -1;
  facts.class_weight_sum = static_cast<double>(p.rule.vocab);
  facts.class_weight_max = 1;
  set_denominator(facts, p.forms_denominator ? p.denominator : 3, p.given);
  facts.counts[0] = facts.valid, facts.counts[1] = facts.ignored;
  facts.counts[2] = facts.poisoned, facts.counts[3] = facts.in_partition;
  *p.facts = facts;
}

__global__ void __launch_bounds__(kBlock) compact_kernel(CompactParams p) { compact<kBlock>(p); }

// The tokens of few, one a thread: their kinds, counted over the block.
struct FewTokens {
  static constexpr int kWarps = kFewBlock / 32;
  TokenKind kind = TokenKind::ignored;
  int place = 0;  // of a valid one in the compacted order
  int valid = 0, poisoned = 0, ignored = 0;

  __device__ FewTokens(const CompactParams& p, int (*warps)[kWarps]) {
    const int t = static_cast<int>(threadIdx.x), lane = t % 32;
    const bool exists = t < p.tokens;
    if (exists) kind = kind_of(p.rule, t);
    const unsigned mine = __ballot_sync(0xffffffffu, kind == TokenKind::valid);
    const unsigned bad = __ballot_sync(0xffffffffu, kind == TokenKind::poisoned);
    if (lane == 0) warps[0][t / 32] = __popc(mine), warps[1][t / 32] = __popc(bad);
    __syncthreads();
    place = __popc(mine & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < t / 32) place += warps[0][w];
      valid += warps[0][w], poisoned += warps[1][w];
    }
    ignored = static_cast<int>(p.tokens) - valid - poisoned;
  }
};

// What compact() does where no token is poisoned and none has a weight: in few instructions, since
// they are fetched anew after each read of a large weight.
__device__ void compact_few(const CompactParams& p, const FewTokens& own) {
  const int t = static_cast<int>(threadIdx.x);
  bool here = false;
  if (own.kind == TokenKind::valid) {
    const int64_t target = p.rule.targets.data ? read_index(p.rule.targets, t) : -1;
    write_row(p, own.place, t, target);
    const int64_t local = target - p.rule.vocab_begin;
    here = p.rule.targets.data && local >= 0 && local < p.rule.vocab_local;
  }
  const int in_partition = __syncthreads_count(here);
  if (t != 0) return;
  BatchFacts facts;
  facts.valid = own.valid, facts.ignored = own.ignored, facts.poisoned = 0;
  facts.in_partition = in_partition;
  facts.first_bad = facts.first_bad_scale = INT_MAX;
  facts.first_bad_value = 0, facts.first_bad_weight = -1;
  facts.weights[0] = facts.weights[1] = facts.weights[2] = own.valid;
  facts.class_weight_sum = static_cast<double>(p.rule.vocab);
  facts.class_weight_max = 1;
  set_denominator(facts, p.forms_denominator ? p.denominator : 3, p.given);
  facts.counts[0] = facts.valid, facts.counts[1] = facts.ignored;
  facts.counts[2] = facts.poisoned, facts.counts[3] = facts.in_partition;
  *p.facts = facts;
}

// The first block compacts; each other finds the row of X that belongs in its place by itself, so
// that one launch does both.
__global__ void __launch_bounds__(kFewBlock) few_rows_kernel(FewRowsParams p) {
  __shared__ int found, warps[2][FewTokens::kWarps];
  talea::sm90::begin_after_earlier_kernels();
  if (threadIdx.x == 0) found = -1;
  const FewTokens own(p.compact, warps);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *p.zeroed = 0;
    const bool weighted = p.compact.class_weight.data || p.compact.token_weight.data;
    if (weighted || own.poisoned > 0) return compact<kFewBlock>(p.compact);
    return compact_few(p.compact, own);
  }
  const int place = static_cast<int>(blockIdx.x) - 1;
  if (own.kind == TokenKind::valid && own.place == place) found = static_cast<int>(threadIdx.x);
  __syncthreads();
  const uint16_t* from = static_cast<const uint16_t*>(p.hidden) + found * p.stride;
  auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.to) + place * p.columns);
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < p.columns / 8; i += kFewBlock)
    to[i] = found < 0 ? uint4{0, 0, 0, 0} : reinterpret_cast<const uint4*>(from)[i];
}

__global__ void __launch_bounds__(kBlock)
    class_weight_kernel(DeviceVector weights, int64_t vocab, BatchFacts* facts) {
  double sum = 0, most = 0;
  int bad = INT_MAX;
  for (int64_t v = threadIdx.x; v < vocab; v += kBlock) {
    const double c = read(weights, v, 1);
    if (!(c >= 0) || isinf(c)) bad = min(bad, static_cast<int>(v));
    sum += c;
    most = fmax(most, c);
  }
  sum = over_block<kBlock>(sum, [](double a, double b) { return a + b; });
  bad = over_block<kBlock>(bad, [](int a, int b) { return min(a, b); });
  most = over_block<kBlock>(most, [](double a, double b) { return fmax(a, b); });
  if (threadIdx.x != 0) return;
  facts->class_weight_sum = sum;
  facts->class_weight_max = most;
  if (bad == INT_MAX) return;
  facts->first_bad_weight = bad;
  facts->class_weight_sum = facts->weights[0] = facts->weights[1] = NAN;
}

__global__ void denominator_kernel(BatchFacts* facts, int denominator, double given) {
  set_denominator(*facts, denominator, given);
}

__global__ void token_kernel(TokenParams p) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= p.tokens) return;
  const int64_t target = p.rule.targets.data ? read_index(p.rule.targets, t) : -1;
  const int64_t local = target - p.rule.vocab_begin;
  const bool here = p.rule.targets.data && kind_of(p.rule, t) == TokenKind::valid && local >= 0 &&
                    local < p.rule.vocab_local;
  p.target[t] = here ? static_cast<int>(local) : -1;
  if (p.scale) p.scale[t] = static_cast<float>(read(p.rule.token_scale, t, 1));
}

__global__ void spread_kernel(SpreadParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < p.facts->valid) p.shift[row] = p.token_shift[p.index[row]];
}

}  // namespace

DeviceVector device_vector(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.rank == 0 ? 0 : t.stride[0]};
}

void prepare_tokens(const TokenParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  token_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("prepare_tokens");
}

void compact_rows(const CompactParams& p, cudaStream_t stream) {
  compact_kernel<<<1, kBlock, 0, stream>>>(p);
  device::check_launch("compact_rows");
}

void find_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  talea::sm90::launch_following(few_rows_kernel, {1 + p.places, kFewBlock, p.follows}, p, stream,
                                "find_few_rows");
}

void sum_class_weights(const DeviceVector& weights, int64_t vocab, BatchFacts* facts,
                       cudaStream_t stream) {
  class_weight_kernel<<<1, kBlock, 0, stream>>>(weights, vocab, facts);
  device::check_launch("sum_class_weights");
}

void form_denominator(BatchFacts* facts, int denominator, double given, cudaStream_t stream) {
  denominator_kernel<<<1, 1, 0, stream>>>(facts, denominator, given);
  device::check_launch("form_denominator");
}

void sort_keys(const uint64_t* from, uint64_t* to, int64_t tokens, int64_t vocab, void* scratch,
               int64_t scratch_bytes, cudaStream_t stream) {
  auto bytes = static_cast<size_t>(scratch_bytes);
  // Rows ascend already and the sort is stable. As many bits of the target as hold `vocab`: there
  // what has no target, all ones, stays above every id.
  const int end = 32 + std::bit_width(static_cast<uint64_t>(vocab | 1));
  device::check(cub::DeviceRadixSort::SortKeys(scratch, bytes, from, to, tokens, 32, end, stream),
                "sort of the targets");
}

void spread_shifts(const SpreadParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  spread_kernel<<<static_cast<unsigned>((p.tokens + 255) / 256), 256, 0, stream>>>(p);
  device::check_launch("spread_shifts");
}

}  // namespace talea::lce
