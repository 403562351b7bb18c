// What: the cut of whole tensors into even shards, and the way back.
// Why: see sharded.hpp.
// Never: moves a weight row: shards are views.
#include "ops/linear_cross_entropy/sharded.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/fail.hpp"
#include "dist/agree.hpp"

namespace talea::lce {
namespace {

struct Cut {
  int64_t first = 0, count = 0;  // rows of the whole
};

Tensor rows(const Tensor& t, Cut cut) {
  if (!t) return t;
  Tensor part = t;
  part.shape[0] = cut.count;
  part.data = static_cast<char*>(t.data) + cut.first * t.stride[0] * size_of(t.dtype);
  return part;
}

// Shard r of V logical rows; the last also holds the padding behind them.
Cut vocab_cut(int64_t vocab, int64_t stored, int ranks, int r) {
  const int64_t begin = even_shard_begin(vocab, ranks, r);
  return {begin, (r + 1 == ranks ? stored : even_shard_begin(vocab, ranks, r + 1)) - begin};
}

class Shard {
 public:
  Shard(const ShardedCall& call, Communicator& c, bool same_memory)
      : whole_(call),
        c_(c),
        same_memory_(same_memory),
        stored_(call.in.weight.shape[0]),
        vocab_(call.options.vocab > 0 ? call.options.vocab : stored_),
        tokens_(call.in.hidden.shape[0]) {
    require(!call.sequence_parallel || tokens_ % c.size() == 0, ErrorKind::usage,
            "sequence_parallel: {} tokens do not divide among {} ranks", tokens_, c.size());
    require(vocab_ <= stored_, ErrorKind::usage, "vocab = {}: the weight has {} rows", vocab_,
            stored_);
  }

  ShardedResult run() {
    in_ = whole_.in;
    out_ = whole_.out;
    LinearCrossEntropyOptions options = whole_.options;
    options.vocab = vocab_;
    const Cut own = vocab(c_.rank());
    in_.weight = rows(in_.weight, own);
    in_.bias = rows(in_.bias, own);
    out_.dw = rows(out_.dw, own);
    out_.db = rows(out_.db, own);
    if (whole_.sequence_parallel) {
      in_.hidden = rows(in_.hidden, tokens(c_.rank()));
      out_.dx = rows(out_.dx, tokens(c_.rank()));
    }
    if (same_memory_ && c_.rank() > 0) keep_apart();
    LinearCrossEntropyRanks ranks;
    ranks.vocab = &c_;
    ranks.vocab_begin = own.first;
    ranks.sequence_parallel = whole_.sequence_parallel;
    ranks.dx_sum = whole_.dx_sum;
    ShardedResult done;
    int64_t bytes = 0;
    fails([&] {
      done.problem = describe(in_, out_, options, ranks);
      bytes = workspace_bytes(done.problem);
    });
    std::vector<char> workspace(static_cast<size_t>(bytes));
    const auto begin = std::chrono::steady_clock::now();
    done.result = linear_cross_entropy(in_, out_, options, {workspace.data(), bytes}, ranks);
    const auto end = std::chrono::steady_clock::now();
    tell(done, std::chrono::duration<double, std::milli>(end - begin).count());
    if (!same_memory_) collect();
    return done;
  }

 private:
  Cut vocab(int r) const { return vocab_cut(vocab_, stored_, c_.size(), r); }
  Cut tokens(int r) const { return {tokens_ / c_.size() * r, tokens_ / c_.size()}; }

  // Every rank writes these outputs, with the same values: only rank 0 into the shared tensors.
  void keep_apart() {
    LinearCrossEntropyOutputs& o = out_;
    for (Tensor* t : {&o.loss, &o.lse, &o.target_logprob, &o.entropy, &o.argmax, &o.accuracy,
                      &o.topk_values, &o.topk_ids, &o.topk_logprobs, &o.dx}) {
      if (!*t || (t == &o.dx && whole_.sequence_parallel)) continue;
      copies_.emplace_back(static_cast<size_t>(t->elements() * size_of(t->dtype)));
      t->data = copies_.back().data();
      int64_t stride = 1;
      for (int i = t->rank - 1; i >= 0; --i) {
        t->stride[i] = stride;
        stride *= t->shape[i];
      }
    }
  }

  void tell(ShardedResult& done, double ms) {
    const Cut own = vocab(c_.rank());
    const ShardFigures mine = {own.first,
                               own.first + done.problem.vocab_local,
                               own.count,
                               done.result.workspace_bytes,
                               done.result.targets_in_partition,
                               ms};
    done.ranks.resize(static_cast<size_t>(c_.size()));
    c_.all_gather(&mine, done.ranks.data(), sizeof mine, nullptr);
  }

  // Processes: the rows that the others own come from them.
  void collect() {
    gather(whole_.out.dw, [this](int r) { return vocab(r); });
    gather(whole_.out.db, [this](int r) { return vocab(r); });
    if (whole_.sequence_parallel) gather(whole_.out.dx, [this](int r) { return tokens(r); });
  }

  template <typename CutOf>
  void gather(const Tensor& t, CutOf cut_of) {
    if (!t) return;
    const int64_t columns = t.rank > 1 ? t.shape[1] : 1, element = size_of(t.dtype);
    int64_t most = 0;
    for (int r = 0; r < c_.size(); ++r) most = std::max(most, cut_of(r).count);
    const int64_t block = most * columns * element;
    std::vector<char> all(static_cast<size_t>(block * c_.size()));
    // Between the tensor and rank r's block.
    const auto move = [&](int r, bool out) {
      const Cut cut = cut_of(r);
      for (int64_t i = 0; i < cut.count; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          char* there = all.data() + r * block + (i * columns + j) * element;
          char* here =
              static_cast<char*>(t.data) +
              ((cut.first + i) * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0)) * element;
          std::memcpy(out ? there : here, out ? here : there, static_cast<size_t>(element));
        }
    };
    move(c_.rank(), true);
    c_.all_gather(all.data() + c_.rank() * block, all.data(), block, nullptr);
    for (int r = 0; r < c_.size(); ++r)
      if (r != c_.rank()) move(r, false);
  }

  const ShardedCall& whole_;
  Communicator& c_;
  const bool same_memory_;
  const int64_t stored_, vocab_, tokens_;
  LinearCrossEntropyInputs in_;
  LinearCrossEntropyOutputs out_;
  std::vector<std::vector<char>> copies_;
};

}  // namespace

ShardedResult run_shard(const ShardedCall& call, Communicator& vocab, bool same_memory) {
  return Shard(call, vocab, same_memory).run();
}

ShardedResult run_thread_shards(const ShardedCall& call, int ranks, double timeout_s) {
  ShardedResult first;
  run_thread_ranks(ranks, timeout_s, [&](Communicator& c) {
    ShardedResult own = run_shard(call, c, true);
    if (c.rank() == 0) first = std::move(own);
  });
  return first;
}

}  // namespace talea::lce
