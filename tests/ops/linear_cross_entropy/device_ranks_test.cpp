// What: the device lanes over vocabulary ranks that share one device: threads whose exchanges go
// through the host.
// Why: the exchange points are a lane's own; which engine carries them is not.
// Never: measures time.
#ifdef TALEA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>

#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/limit.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

// A host communicator for device memory: waits for the stream, exchanges, copies back.
class Staged final : public Communicator {
 public:
  explicit Staged(Communicator& host) : host_(host) {}
  const char* engine() const override { return "threads, staged"; }
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream stream) override {
    const std::vector<char> own = fetch(send, bytes, stream);
    std::vector<char> all(static_cast<size_t>(bytes * size()));
    host_.all_gather(own.data(), all.data(), bytes, nullptr);
    store(recv, all, stream);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream stream) override {
    std::vector<char> own = fetch(buffer, count * size_of(dtype), stream);
    host_.all_reduce_sum(own.data(), count, dtype, nullptr);
    store(buffer, own, stream);
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream stream) override {
    const std::vector<char> own = fetch(send, count * size() * size_of(dtype), stream);
    std::vector<char> sum(static_cast<size_t>(count * size_of(dtype)));
    host_.reduce_scatter_sum(own.data(), sum.data(), count, dtype, nullptr);
    store(recv, sum, stream);
  }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    return host_.host_gather(send, recv, bytes);
  }

 private:
  static void check(cudaError_t status) {
    if (status != cudaSuccess) throw Error(ErrorKind::runtime, cudaGetErrorString(status));
  }
  static std::vector<char> fetch(const void* from, int64_t bytes, Stream stream) {
    std::vector<char> to(static_cast<size_t>(bytes));
    const auto s = static_cast<cudaStream_t>(stream);
    check(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, s));
    check(cudaStreamSynchronize(s));
    return to;
  }
  static void store(void* to, const std::vector<char>& from, Stream stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    check(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, s));
    check(cudaStreamSynchronize(s));
  }

  Communicator& host_;
};

// One rank's tensors in device memory.
struct RankCall {
  Case part;
  std::vector<std::pair<Array*, void*>> outputs;
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  Workspace workspace;

  Tensor put(Place& place, Array& a, bool output) {
    if (!a.present()) return {};
    void* base = place.allocate(static_cast<int64_t>(a.block().size()));
    place.upload(base, a.block().data(), static_cast<int64_t>(a.block().size()));
    if (output) outputs.emplace_back(&a, base);
    return a.at(base, DeviceKind::cuda);
  }

  RankCall(Place& place, Case given, const std::string& lane) : part(std::move(given)) {
    CaseInputs& i = part.in;
    in.hidden = put(place, i.hidden, false);
    in.weight = put(place, i.weight, false);
    in.bias = put(place, i.bias, false);
    in.targets = put(place, i.targets, false);
    in.class_weight = put(place, i.class_weight, false);
    in.token_weight = put(place, i.token_weight, false);
    in.token_scale = put(place, i.token_scale, false);
    in.soft_target_ids = put(place, i.soft_target_ids, false);
    in.soft_target_probs = put(place, i.soft_target_probs, false);
    in.upstream = put(place, i.upstream, false);
    in.upstream_lse = put(place, i.upstream_lse, false);
    in.upstream_entropy = put(place, i.upstream_entropy, false);
    CaseOutputs& o = part.out;
    out = {put(place, o.loss, true),
           put(place, o.lse, true),
           put(place, o.target_logprob, true),
           put(place, o.entropy, true),
           put(place, o.argmax, true),
           put(place, o.accuracy, true),
           put(place, o.topk_values, true),
           put(place, o.topk_ids, true),
           put(place, o.topk_logprobs, true),
           put(place, o.dx, true),
           put(place, o.dw, true),
           put(place, o.db, true),
           part.accumulate_dw,
           part.accumulate_db};
    part.options.lane = lane;
  }

  LinearCrossEntropyRanks ranks(Communicator& c, const Shard& shard, bool sequence) const {
    LinearCrossEntropyRanks r;
    r.vocab = &c, r.vocab_begin = shard.begin, r.sequence_parallel = sequence;
    return r;
  }
  void fetch(Place& place) {
    for (auto& [array, base] : outputs)
      place.download(array->block().data(), base, static_cast<int64_t>(array->block().size()));
  }
};

// Writes `part`'s rows into `whole`'s, from row `first` on.
void join(Array& whole, const Array& part, int64_t first, int64_t count) {
  if (!whole.present()) return;
  const int64_t columns = whole.shape().size() > 1 ? whole.shape()[1] : 1;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < columns; ++j) whole.set(first + i, j, part.get(i, j));
}

// The whole case from its ranks; every rank must say the same of the rows.
std::string run_ranks(const Case& whole, const Layout& shards, bool sequence,
                      const std::string& lane) {
  std::string why;
  Place* place = place_of(lane, why);
  if (!place) return why;
  const int size = static_cast<int>(shards.size());
  std::vector<std::unique_ptr<RankCall>> calls;  // each knows where its own arrays lie
  for (int r = 0; r < size; ++r)
    calls.push_back(std::make_unique<RankCall>(
        *place, shard_case(whole, shards[size_t(r)], sequence, r, size), lane));
  run_thread_ranks(size, 60, [&](Communicator& host) {
    Staged c(host);
    RankCall& call = *calls[static_cast<size_t>(c.rank())];
    const LinearCrossEntropyRanks ranks =
        call.ranks(c, shards[static_cast<size_t>(c.rank())], sequence);
    call.part.options = with_kept_limit(call.in, call.out, call.part.options, ranks);
    const LinearCrossEntropyProblem p = describe(call.in, call.out, call.part.options, ranks);
    call.workspace.bytes = workspace_bytes(p);
    if (cudaMalloc(&call.workspace.data, static_cast<size_t>(call.workspace.bytes)) != cudaSuccess)
      throw Error(ErrorKind::runtime, "no memory for the workspace");
    cudaMemsetAsync(call.workspace.data, 0xff, static_cast<size_t>(call.workspace.bytes),
                    static_cast<cudaStream_t>(place->stream()));
    linear_cross_entropy(call.in, call.out, call.part.options, call.workspace, ranks,
                         place->stream());
  });
  count_run(lane);
  Case joined = whole;
  std::string wrong;
  for (int r = 0; r < size; ++r) {
    RankCall& call = *calls[static_cast<size_t>(r)];
    call.fetch(*place);
    cudaFree(call.workspace.data);
    const CaseOutputs& got = call.part.out;
    const int64_t rows = got.dx.present() ? got.dx.shape()[0] : 0;
    if (sequence)
      join(joined.out.dx, got.dx, r * rows, rows);
    else if (r == 0)
      joined.out.dx = got.dx;
    else
      wrong += same_bits("dx", joined.out.dx, got.dx);
    join(joined.out.dw, got.dw, shards[size_t(r)].begin, shards[size_t(r)].logical);
    join(joined.out.db, got.db, shards[size_t(r)].begin, shards[size_t(r)].logical);
    for (const auto& [name, member] : CaseOutputs::members) {
      const std::string_view n = name;
      if (n == "dx" || n == "dw" || n == "db") continue;
      if (r == 0)
        joined.out.*member = got.*member;
      else
        wrong += same_bits(name, joined.out.*member, got.*member);
    }
  }
  place->reset();
  return wrong + judge(whole, joined.out, yardsticks(whole));
}

class DeviceRanks : public LaneTest {
 protected:
  void hold(Types types, int vocab) {
    struct Setting {
      const char* name;
      void (*bend)(Spec&);
    };
    const Setting settings[] = {
        {"plain", [](Spec&) {}},
        {"smoothing", [](Spec& s) { s.label_smoothing = 0.1, s.class_weight = true; }},
        {"capped, smoothed, ranked",
         [](Spec& s) { s.softcap = 5, s.label_smoothing = 0.1, s.top_k = 5; }},
        {"gradient of the entropy", [](Spec& s) { s.upstream_entropy = true; }},
        {"dense soft targets", [](Spec& s) { s.soft = Soft::dense; }},
        {"sparse soft targets", [](Spec& s) { s.soft = Soft::sparse; }},
        {"ignored and foreign", [](Spec& s) { s.ignored_percent = 40, s.poison = true; }},
        {"ignored, loss and gradients alone",
         [](Spec& s) { s.ignored_percent = 40, s.wants_rows = false; }}};
    for (const Setting& setting : settings)
      for (const char* cut : {"even", "ragged", "empty_first"})
        for (const int ranks : {1, 2, 3})
          for (const bool sequence : {false, true}) {
            Spec s{.seed = 29, .tokens = 24, .hidden = vocab > 100 ? 264 : 16, .vocab = vocab};
            s.types = types;
            s.reduction = Reduction::none;
            s.bias = true;
            setting.bend(s);
            EXPECT_EQ("", run_ranks(make_case(s), layout(cut, vocab, ranks), sequence, lane()))
                << setting.name << ", vocab " << vocab << " cut " << cut << ", " << ranks
                << " ranks, sequence " << sequence;
          }
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceRanks);

TEST_P(DeviceRanks, SmallWeights) { hold(Types::bf16, 61); }
TEST_P(DeviceRanks, LargeWeights) { hold(Types::bf16, 601); }
TEST_P(DeviceRanks, HalfPrecision) { hold(Types::f16, 601); }

// Some lanes take 16 bits alone.
class SinglePrecisionRanks : public DeviceRanks {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SinglePrecisionRanks);

TEST_P(SinglePrecisionRanks, OfASmallWeight) { hold(Types::f32, 50); }
TEST_P(SinglePrecisionRanks, OfALargeWeight) { hold(Types::f32, 601); }

std::vector<std::string> device_lanes(bool of_16_bits_alone) {
  std::vector<std::string> names;
  for (const std::string& lane : lanes_here())
    if (is_device_lane(lane) && (of_16_bits_alone || !needs_16bit_rows(lane)))
      names.push_back(lane);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Lanes, DeviceRanks, ::testing::ValuesIn(device_lanes(true)),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Lanes, SinglePrecisionRanks, ::testing::ValuesIn(device_lanes(false)),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace talea::testing
#endif
