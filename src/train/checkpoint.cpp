// What: states to and from named tensors.
// Why: safetensors is readable by every tool, and its writer renames only complete files.
// Never: trusts a file: shapes, identity and content hash are checked before any state changes.
#include "train/checkpoint.hpp"

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "io/safetensors.hpp"
#include "train/record.hpp"

namespace talea::train {
namespace {

constexpr int64_t counters = 7;

template <typename T>
constexpr DType dtype_of = sizeof(T) == 4 ? DType::f32 : DType::f64;

template <typename T>
uint64_t hash_of(const TrainState<T>& s, uint64_t seed) {
  for (const auto* v : {&s.params, &s.m, &s.v, &s.grads})
    seed = hash_bytes(v->data(), static_cast<int64_t>(v->size() * sizeof(T)), seed);
  return seed;
}

template <typename T>
void pack_counters(const TrainState<T>& s, uint64_t identity, int64_t* to) {
  to[0] = s.step;
  to[1] = s.cursor;
  to[2] = s.window_done;
  to[3] = s.window_valid;
  to[4] = s.window_tokens;
  to[5] = std::bit_cast<int64_t>(s.window_loss);
  to[6] = std::bit_cast<int64_t>(hash_of(s, hash_bytes(to, 6 * 8, identity)));
}

// The tensors of one run; `numbers` keeps the counters alive until the file is written.
template <typename T>
void describe(const std::string& name, const Layout& layout, const TrainState<T>& s,
              int64_t* numbers, std::vector<io::NamedTensor>& list) {
  const int64_t count = layout.size();
  for (const Slice& p : layout.slices())
    list.push_back({name + "/params/" + p.name,
                    make_tensor(s.params.data() + p.offset, dtype_of<T>, {p.rows, p.columns})});
  list.push_back({name + "/m", make_tensor(s.m.data(), dtype_of<T>, {count})});
  list.push_back({name + "/v", make_tensor(s.v.data(), dtype_of<T>, {count})});
  list.push_back({name + "/grads", make_tensor(s.grads.data(), dtype_of<T>, {count})});
  list.push_back({name + "/counters", make_tensor(numbers, DType::i64, {counters})});
}

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path) {}

  void read(const std::string& key, DType dtype, int64_t count, void* to) const {
    const io::HostTensor t = file_.read(key);
    require(t.view.dtype == dtype && t.view.elements() == count, ErrorKind::invalid_data,
            "{}: {} holds {} {} values where {} {} are needed", path_, key, t.view.elements(),
            talea::name_of(t.view.dtype), count, talea::name_of(dtype));
    if (count > 0) std::memcpy(to, t.view.data, static_cast<size_t>(t.bytes()));
  }

  template <typename T>
  TrainState<T> state(const std::string& name, const Layout& layout, uint64_t identity) const {
    TrainState<T> s;
    const auto count = static_cast<size_t>(layout.size());
    for (auto* v : {&s.params, &s.m, &s.v, &s.grads}) v->resize(count);
    for (const Slice& p : layout.slices())
      read(name + "/params/" + p.name, dtype_of<T>, p.size(), s.params.data() + p.offset);
    read(name + "/m", dtype_of<T>, layout.size(), s.m.data());
    read(name + "/v", dtype_of<T>, layout.size(), s.v.data());
    read(name + "/grads", dtype_of<T>, layout.size(), s.grads.data());
    int64_t n[counters] = {};
    read(name + "/counters", DType::i64, counters, n);
    s.step = n[0];
    s.cursor = n[1];
    s.window_done = n[2];
    s.window_valid = n[3];
    s.window_tokens = n[4];
    s.window_loss = std::bit_cast<double>(n[5]);
    require(std::bit_cast<int64_t>(hash_of(s, hash_bytes(n, 6 * 8, identity))) == n[6],
            ErrorKind::invalid_data,
            "{}: {}/counters: the content hash differs: a damaged file, or a checkpoint of a run "
            "with another configuration or text",
            path_, name);
    require(s.step >= 0 && s.cursor >= 0 && s.window_done >= 0, ErrorKind::invalid_data,
            "{}: {}/counters: negative", path_, name);
    return s;
  }

 private:
  std::string path_;
  io::SafetensorsFile file_;
};

// Base and twins, then the lanes beside: the order of TwinRun::others().
std::string other_name(size_t i) { return fmt::format("other{}", i); }

}  // namespace

void save_checkpoint(const std::string& path, TwinRun& run, uint64_t identity) {
  std::vector<int64_t> numbers((run.others().size() + 2) * counters);
  std::vector<io::NamedTensor> list;
  const Layout& layout = run.candidate().layout();
  int64_t* at = numbers.data();
  auto one = [&](const std::string& name, const auto& state) {
    pack_counters(state, identity, at);
    describe(name, layout, state, at, list);
    at += counters;
  };
  one("candidate", run.candidate().state());
  one("reference", run.reference().state());
  for (size_t i = 0; i < run.others().size(); ++i) one(other_name(i), run.others()[i].state());
  io::write_safetensors(path, list, {{"format", "talea-train-1"}});
}

void load_checkpoint(const std::string& path, TwinRun& run, uint64_t identity) {
  const Reader reader(path);
  const Layout& layout = run.candidate().layout();
  auto candidate = reader.state<float>("candidate", layout, identity);
  auto reference = reader.state<double>("reference", layout, identity);
  std::vector<TrainState<float>> others;
  for (size_t i = 0; i < run.others().size(); ++i)
    others.push_back(reader.state<float>(other_name(i), layout, identity));
  run.candidate().state() = std::move(candidate);
  run.reference().state() = std::move(reference);
  for (size_t i = 0; i < others.size(); ++i) run.others()[i].state() = std::move(others[i]);
}

void save_parameters(const std::string& path, const Layout& layout,
                     const std::vector<float>& params) {
  std::vector<io::NamedTensor> list;
  for (const Slice& p : layout.slices())
    list.push_back(
        {p.name, make_tensor(params.data() + p.offset, DType::f32, {p.rows, p.columns})});
  io::write_safetensors(path, list, {{"format", "talea-parameters-1"}});
}

uint64_t run_identity(const TrainConfig& config, const TwinOptions& options, const Corpus& corpus) {
  TrainConfig c = config;
  c.threads = 0;
  c.data.text_files.clear();  // the corpus is named by its bytes
  if (c.optimizer.schedule == Schedule::constant || c.optimizer.schedule_steps > 0) {
    c.max_steps = 0;
    c.data.epochs = 1;
  }
  const std::string text =
      to_json(c).dump() + fmt::format(" twins {} beside {} mutant {} corpus {}", options.twins,
                                      fmt::join(options.beside, ","), options.mutant, corpus.hash);
  return hash_bytes(text.data(), static_cast<int64_t>(text.size()));
}

}  // namespace talea::train
