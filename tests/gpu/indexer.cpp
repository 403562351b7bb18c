// What: the selection and the index loss of sparse attention on the CUDA lanes: the same bits every
//       time, alone, beside a busy stream and replayed with other inputs; no allocation.
// Why: chunks of queries follow each other through one workspace; a wait that is missing there shows
//      as bits that differ between runs.
// Never: compares lanes with each other, or judges values.
#include <gtest/gtest.h>

#include "core/device_session.hpp"
#include "gpu/again.hpp"
#include "gpu/batch.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::gpu {
namespace {

namespace sa = sparse_attention;

enum class What { select, loss_of_lists, loss_of_all };
struct IndexerCase {
  const char* name;
  What what;
  const char* lane;
};

// One of the calls, on a session of its own; several chunks of queries.
class Indexer {
 public:
  Indexer(const IndexerCase& c, int64_t queries, uint64_t seed) : what_(c.what) {
    std::string why;
    session_ = DeviceSession::open(0, why);
    if (!session_) throw Error(ErrorKind::unavailable, why);
    constexpr int64_t keys = 1500, heads = 16, dim = 64, top_k = 128;
    index_q_ = make(DType::bf16, {queries, heads, dim});
    index_k_ = make(DType::bf16, {keys, dim});
    weights_ = make(DType::f32, {queries, heads});
    if (what_ == What::select)
      prepare_selection(queries, keys, top_k, c.lane);
    else
      prepare_loss(queries, keys, top_k, c.lane);
    draw(seed);
  }
  void draw(uint64_t seed) {
    for (const Tensor& t : {index_q_, index_k_, weights_, loss_.q, loss_.kv})
      if (t.present) session_->fill_normal(t, ++seed * 7, 0.5);
    if (loss_.indices.present) session_->fill_ids(loss_.indices, seed, index_k_.shape[0]);
    session_->synchronise();
  }
  void run() {
    if (what_ == What::select)
      sa::select(selection_, selected_, how_, room_, {}, session_->stream());
    else
      sa::index_loss(loss_, gradients_, loss_how_, room_, {}, session_->stream());
  }
  void poison() {
    for (const Tensor& t : outputs_)
      session_->fill_bytes(t.data, 0xff, t.elements() * size_of(t.dtype));
  }
  std::vector<std::byte> bits() {
    std::vector<std::byte> all;
    for (const Tensor& t : outputs_) {
      std::vector<std::byte> bytes(static_cast<size_t>(t.elements() * size_of(t.dtype)));
      session_->download(bytes.data(), t.data, static_cast<int64_t>(bytes.size()));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  DeviceSession& session() { return *session_; }
  cudaStream_t stream() { return static_cast<cudaStream_t>(session_->stream()); }

 private:
  void prepare_selection(int64_t queries, int64_t keys, int64_t top_k, const char* lane) {
    selection_.index_q = index_q_, selection_.index_k = index_k_;
    selection_.index_weights = weights_;
    selected_.indices = make(DType::i32, {queries, top_k});
    selected_.topk_length = make(DType::i32, {queries});
    selected_.scores = make(DType::f32, {queries, top_k});
    outputs_ = {selected_.indices, selected_.topk_length, selected_.scores};
    how_.causal = true, how_.q_position_base = keys - queries;
    how_.lane = lane, how_.workspace_limit_bytes = int64_t{5} << 20;
    room_ = room(sa::describe(selection_, selected_, how_));
  }
  void prepare_loss(int64_t queries, int64_t keys, int64_t top_k, const char* lane) {
    loss_.index_q = index_q_, loss_.index_k = index_k_, loss_.index_weights = weights_;
    loss_.q = make(DType::bf16, {queries, 8, 64});
    loss_.kv = make(DType::bf16, {keys, 64});
    const bool lists = what_ == What::loss_of_lists;
    if (lists) loss_.indices = make(DType::i64, {queries, top_k});
    loss_how_.keys = lists ? sa::LossKeys::sparse : sa::LossKeys::dense;
    loss_how_.causal = !lists, loss_how_.q_position_base = lists ? 0 : keys - queries;
    gradients_.loss = make(DType::f32, {});
    gradients_.dindex_q = make(DType::bf16, {queries, 16, 64});
    gradients_.dindex_k = make(DType::f32, {keys, 64});
    gradients_.dindex_weights = make(DType::f32, {queries, 16});
    outputs_ = {gradients_.loss, gradients_.dindex_q, gradients_.dindex_k,
                gradients_.dindex_weights};
    loss_how_.lane = lane, loss_how_.workspace_limit_bytes = int64_t{16} << 20;
    room_ = room(sa::describe(loss_, gradients_, loss_how_));
  }
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, 0);
    t.data = session_->allocate(t.elements() * size_of(dtype));
    return t;
  }
  Workspace room(const sa::Problem& p) {
    const int64_t bytes = sa::workspace_bytes(p);
    return {bytes > 0 ? session_->allocate(bytes) : nullptr, bytes};
  }

  What what_;
  std::unique_ptr<DeviceSession> session_;
  Tensor index_q_, index_k_, weights_;
  sa::SelectInputs selection_;
  sa::SelectOutputs selected_;
  sa::SelectOptions how_;
  sa::IndexLossInputs loss_;
  sa::IndexLossOutputs gradients_;
  sa::IndexLossOptions loss_how_;
  std::vector<Tensor> outputs_;
  Workspace room_;
};

class IndexerOnDevice : public ::testing::TestWithParam<IndexerCase> {};

TEST_P(IndexerOnDevice, SameBitsAThousandTimes) {
  Indexer a(GetParam(), 150, 1);
  same_bits_a_thousand_times(a);
}

TEST_P(IndexerOnDevice, SameBitsBesideABusyStream) {
  Indexer a(GetParam(), 150, 1), noise(GetParam(), 400, 9);
  same_bits_beside(noise, a);
}

TEST_P(IndexerOnDevice, ReplayedWithOtherInputs) {
  Indexer a(GetParam(), 150, 1);
  same_bits_replayed(a, [&](uint64_t i) { a.draw(100 * i + 1); });
}

INSTANTIATE_TEST_SUITE_P(Calls, IndexerOnDevice,
                         ::testing::Values(IndexerCase{"selection_sm90", What::select, "sm90"},
                                           IndexerCase{"selection_cuda", What::select, "cuda"},
                                           IndexerCase{"loss_of_lists", What::loss_of_lists,
                                                       "cuda"},
                                           IndexerCase{"loss_of_all", What::loss_of_all, "cuda"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace talea::gpu
