// What: sparse attention on the CUDA lanes: the same bits every time, alone, beside a busy stream and
//      replayed with other lists; no allocation, no synchronisation.
// Why: its backward pass hands tiles from blocks to blocks and from chunk to chunk; a wait that is
//      missing there shows as bits that differ between runs.
// Never: compares lanes with each other, or judges values.
#include <gtest/gtest.h>

#include "core/device_session.hpp"
#include "gpu/again.hpp"
#include "gpu/batch.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::gpu {
namespace {

namespace sa = sparse_attention;

struct AttentionSpec {
  int64_t queries = 150, keys = 500, heads = 128, slots = 200, dim = 192, value_dim = 128;
  int64_t workspace_limit_bytes = int64_t{24} << 20;  // several chunks of queries
  uint64_t seed = 1;
  bool packed = false;  // rows of fp8_656, which have no backward pass
};

// A step of decoding: few queries of long lists, which many blocks share.
constexpr AttentionSpec decode = {
    .queries = 2, .keys = 3000, .slots = 1900, .dim = 576, .value_dim = 512, .packed = true};
AttentionSpec plain_decode() {
  AttentionSpec s = decode;
  s.packed = false;
  return s;
}

// Many queries of few heads, which have a kernel of their own.
constexpr AttentionSpec few_heads = {
    .queries = 300, .keys = 1500, .heads = 16, .slots = 700, .dim = 576, .value_dim = 512};

// Forward and backward with a sink and an upstream of lse, on a session of its own.
class Attention {
 public:
  Attention(const AttentionSpec& s, const std::string& lane) {
    std::string why;
    session_ = DeviceSession::open(0, why);
    if (!session_) throw Error(ErrorKind::unavailable, why);
    const auto normal = [&](DType dtype, std::initializer_list<int64_t> shape, double deviation) {
      const Tensor t = make(dtype, shape);
      session_->fill_normal(t, s.seed + ++count_, deviation);
      return t;
    };
    in_.q = normal(DType::bf16, {s.queries, s.heads, s.dim}, 1);
    in_.kv = normal(DType::bf16, {s.keys, s.dim}, 1);
    if (s.packed) {
      const Tensor rows = make(DType::u8, {s.keys, 656});
      sa::pack_rows(in_.kv, rows, session_->stream());
      in_.kv = rows;
      options_.kv_storage = sa::KvStorage::fp8_656;
    }
    in_.sink = normal(DType::f32, {s.heads}, 1);
    in_.indices = make(DType::i64, {s.queries, s.slots});
    first_ = in_;
    in_.d_o = normal(DType::bf16, {s.queries, s.heads, s.value_dim}, 1);
    in_.d_lse = normal(DType::f32, {s.queries, s.heads}, 1);
    new_lists(s.seed, s.keys);
    out_.o = make(DType::bf16, {s.queries, s.heads, s.value_dim});
    out_.lse = make(DType::f32, {s.queries, s.heads});
    in_.o = out_.o, in_.lse = out_.lse;
    grad_.dq = make(DType::bf16, {s.queries, s.heads, s.dim});
    grad_.dkv = make(DType::f32, {s.keys, s.dim});
    grad_.d_sink = make(DType::f32, {s.heads});
    options_.value_dim = s.value_dim;
    options_.lane = lane;
    options_.workspace_limit_bytes = s.workspace_limit_bytes;
    forward_ = room(sa::describe(sa::Pass::forward, first_, out_, options_));
    if (s.packed)
      grad_ = {};
    else
      backward_ = room(sa::describe(sa::Pass::backward, in_, grad_, options_));
    session_->synchronise();
  }

  void new_lists(uint64_t seed, int64_t keys) { session_->fill_ids(in_.indices, seed, keys); }
  void run() {
    sa::forward(first_, out_, options_, forward_, {}, session_->stream());
    if (grad_.dq.present) sa::backward(in_, grad_, options_, backward_, {}, session_->stream());
  }
  void poison() {
    for (const Tensor& t : outputs())
      session_->fill_bytes(t.data, 0xff, t.elements() * size_of(t.dtype));
  }
  std::vector<std::byte> bits() {
    std::vector<std::byte> all;
    for (const Tensor& t : outputs()) {
      std::vector<std::byte> bytes(static_cast<size_t>(t.elements() * size_of(t.dtype)));
      session_->download(bytes.data(), t.data, static_cast<int64_t>(bytes.size()));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  DeviceSession& session() { return *session_; }
  cudaStream_t stream() { return static_cast<cudaStream_t>(session_->stream()); }

 private:
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, 0);
    t.data = session_->allocate(t.elements() * size_of(dtype));
    return t;
  }
  Workspace room(const sa::Problem& p) {
    const int64_t bytes = sa::workspace_bytes(p);
    return {bytes > 0 ? session_->allocate(bytes) : nullptr, bytes};
  }
  std::vector<Tensor> outputs() const {
    if (!grad_.dq.present) return {out_.o, out_.lse};
    return {out_.o, out_.lse, grad_.dq, grad_.dkv, grad_.d_sink};
  }

  std::unique_ptr<DeviceSession> session_;
  uint64_t count_ = 0;
  sa::Inputs first_, in_;
  sa::Outputs out_, grad_;
  sa::Options options_;
  Workspace forward_, backward_;
};

class AttentionOnDevice : public ::testing::TestWithParam<std::string> {};

TEST_P(AttentionOnDevice, SameBitsAThousandTimes) {
  for (const AttentionSpec& s : {AttentionSpec{}, decode, plain_decode(), few_heads}) {
    SCOPED_TRACE(s.queries);
    Attention a(s, GetParam());
    same_bits_a_thousand_times(a);
  }
}

TEST_P(AttentionOnDevice, SameBitsBesideABusyStream) {
  for (const AttentionSpec& s : {AttentionSpec{}, AttentionSpec{.heads = 40},
                                 AttentionSpec{.heads = 130}, decode, few_heads}) {
    SCOPED_TRACE(s.heads);
    Attention a(s, GetParam());
    Attention noise({.queries = 600, .seed = 9}, GetParam());
    same_bits_beside(noise, a);
  }
}

TEST_P(AttentionOnDevice, ReplayedWithOtherLists) {
  for (const AttentionSpec& s :
       {AttentionSpec{.dim = 576, .value_dim = 512}, decode, plain_decode(), few_heads}) {
    Attention a(s, GetParam());
    same_bits_replayed(a, [&](uint64_t i) { a.new_lists(i + 1, 300 + static_cast<int64_t>(i)); });
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, AttentionOnDevice, ::testing::ValuesIn(lanes()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace talea::gpu
