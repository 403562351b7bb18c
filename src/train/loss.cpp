// What: the loss through the operator's public C++ interface.
// Why: what is trained with is what users call.
// Never: retries with another lane.
#include "train/loss.hpp"

#include "ops/linear_cross_entropy/sharded.hpp"
#include "train/variants.hpp"

namespace talea::train {
namespace {

template <typename T>
constexpr DType dtype_of = sizeof(T) == 4 ? DType::f32 : DType::f64;

template <typename T>
class OperatorLoss : public Loss<T> {
 public:
  OperatorLoss(std::string lane, const TrainConfig& c, int threads) : lane_(std::move(lane)) {
    options_.lane = lane_;
    options_.label_smoothing = c.label_smoothing;
    options_.z_loss = c.z_loss;
    options_.threads = threads;
    options_.ignore_index = ignore_index;
    // The fp64 reference and the noise twins stay in a world of one.
    if (lane_ == c.loss_lane && sizeof(T) == 4) {
      ranks_ = c.world ? c.world->size() : c.ranks;
      world_ = c.world;
      sequence_parallel_ = c.sequence_parallel;
    }
  }

  HeadResult<T> run(const HeadCall<T>& c) override {
    const Batch& b = *c.batch;
    HeadResult<T> result;
    result.lse.resize(static_cast<size_t>(c.tokens));
    LinearCrossEntropyInputs in;
    in.hidden = make_tensor(c.x, dtype_of<T>, {c.tokens, c.hidden});
    in.weight = make_tensor(c.w, dtype_of<T>, {c.vocab, c.hidden});
    LinearCrossEntropyOutputs out;
    out.loss = make_tensor(&result.loss, DType::f64, {});
    out.lse = make_tensor(result.lse.data(), dtype_of<T>, {c.tokens});
    if (b.soft_k > 0) {
      in.soft_target_ids = make_tensor(b.soft_ids.data(), DType::i64, {c.tokens, b.soft_k});
      in.soft_target_probs = make_tensor(b.soft_probs.data(), DType::f32, {c.tokens, b.soft_k});
    } else {
      result.logp.resize(static_cast<size_t>(c.tokens));
      in.targets = make_tensor(b.targets.data(), DType::i64, {c.tokens});
      out.target_logprob = make_tensor(result.logp.data(), dtype_of<T>, {c.tokens});
    }
    in.upstream = make_tensor(&c.share.upstream, DType::f64, {});
    if (c.dx) {
      out.dx = make_tensor(c.dx, dtype_of<T>, {c.tokens, c.hidden});
      out.dw = make_tensor(c.dw, dtype_of<T>, {c.vocab, c.hidden});
      out.accumulate_dw = true;
    }
    LinearCrossEntropyOptions options = options_;
    options.on_empty = c.share.empty_is_zero ? OnEmpty::zero : OnEmpty::nan;
    if (c.share.denominator > 0) {
      options.denominator = Denominator::given;
      options.denominator_value = c.share.denominator;
    }
    if (ranks_ > 1) {
      const lce::ShardedCall call{in, out, options, sequence_parallel_};
      lane_ =
          (world_ ? run_shard(call, *world_, false) : run_thread_shards(call, ranks_)).result.lane;
      return result;
    }
    const int64_t needed = workspace_bytes(describe(in, out, options));
    if (static_cast<int64_t>(workspace_.size()) < needed)
      workspace_.resize(static_cast<size_t>(needed));
    lane_ = linear_cross_entropy(in, out, options, {workspace_.data(), needed}).lane;
    return result;
  }

  std::string lane() const override { return lane_; }

 private:
  std::string lane_;
  LinearCrossEntropyOptions options_;
  std::vector<char> workspace_;
  int ranks_ = 1;
  bool sequence_parallel_ = false;
  Communicator* world_ = nullptr;
};

}  // namespace

template <typename T>
std::unique_ptr<Loss<T>> make_loss(const std::string& name, const TrainConfig& config,
                                   int threads) {
  if (is_loss_mutant(name)) return make_loss_mutant<T>(name, config);
  return std::make_unique<OperatorLoss<T>>(name, config, threads);
}

template std::unique_ptr<Loss<float>> make_loss(const std::string&, const TrainConfig&, int);
template std::unique_ptr<Loss<double>> make_loss(const std::string&, const TrainConfig&, int);

}  // namespace talea::train
