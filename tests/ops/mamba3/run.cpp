// What: runs one lane of the scan on one case, with everything around the tensors watched.
// Why: inputs unchanged, guards intact and the declared workspace are checked on every call.
// Never: judges the values.
#include "ops/mamba3/run.hpp"

#include <cmath>
#include <cstring>

namespace talea::yardsticks::mamba3 {
namespace {

using talea::mamba3::Outputs;
using talea::mamba3::Pass;
using talea::mamba3::Result;

// A block of 0xFF at an odd multiple of 8 bytes, with guards.
class Room {
 public:
  explicit Room(int64_t bytes) : bytes_(bytes), block_(static_cast<size_t>(bytes + 256)) {
    const auto base = reinterpret_cast<uintptr_t>(block_.data());
    first_ = static_cast<int64_t>((16 - base % 16) % 16 + 72);
    std::memset(block_.data(), 0xC3, block_.size());
    std::memset(block_.data() + first_, 0xFF, static_cast<size_t>(bytes_));
  }
  Workspace workspace() { return {block_.data() + first_, bytes_}; }
  std::vector<std::byte>& block() { return block_; }
  bool intact() const {
    for (int64_t i = 0; i < static_cast<int64_t>(block_.size()); ++i)
      if ((i < first_ || i >= first_ + bytes_) && block_[static_cast<size_t>(i)] != std::byte{0xC3})
        return false;
    return true;
  }

 private:
  int64_t bytes_, first_ = 0;
  std::vector<std::byte> block_;
};

HostTensor fresh(const Case& c, const std::string& name) {
  const bool rows = name == "d_q" || name == "d_k";
  HostTensor t(output_dtype(c, name), shape_of(c, name), rows ? c.rows : Layout{});
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, c.accumulate ? 1.0 : NAN);
  return t;
}

Tensors make_outputs(const Case& c, const std::vector<std::string>& names, const How& how) {
  Tensors out;
  for (const std::string& n : names)
    if (how.only.empty() || how.only.count(n)) out[n] = fresh(c, n);
  return out;
}

void watch(const Case& before, const Case& after, const Tensors& out, const Room& room,
           std::string& damage) {
  for (const auto& [name, tensor] : before.in)
    if (tensor.bytes() != after.in.at(name).bytes()) damage += "input " + name + " changed\n";
  for (const auto& [name, tensor] : out)
    if (!tensor.guards_intact()) damage += "bytes beside " + name + " changed\n";
  if (!room.intact()) damage += "bytes beside the workspace changed\n";
}

// What a device counts instead of saying it, as a host says it.
void take_counts(const Case& c, const HostTensor& status, Result& r) {
  r.bad_entries = static_cast<int64_t>(status.get(0));
  r.bad_slots = static_cast<int64_t>(status.get(3));
  const auto* counts = static_cast<const int64_t*>(status.view().data);
  if (c.options.sequence_check != talea::mamba3::SequenceCheck::clamp)
    talea::mamba3::require_clean(counts);
}

Result call(Pass pass, const Case& c, const Tensors& in, Tensors& out, const How& how,
            std::string& damage) {
  const bool backward = pass == Pass::backward;
  Case work = c;
  Tensors read = in;
  const bool counts = counts_on_device(c.options.lane);
  if (counts) out["status"] = HostTensor(DType::i64, {4});
  const auto inputs = inputs_of(read, backward);
  Outputs outputs = outputs_of(out, backward);
  outputs.d.accumulate_parameters = c.accumulate;
  Errand errand(c.options.lane, pass, inputs, outputs, c.options, how.ranks);
  for (auto& [name, tensor] : read) errand.bring(tensor.bytes());
  for (auto& [name, tensor] : out) errand.bring(tensor.bytes());
  Room room(errand.workspace_bytes());
  errand.bring(room.block());
  Result r = errand.run(room.workspace());
  work.in = read;
  Case before = c;
  before.in = in;
  watch(before, work, out, room, damage);
  if (counts) {
    take_counts(c, out.at("status"), r);
    out.erase("status");
  }
  return r;
}

HostTensor room_for_saved(const Case& c, const How& how, const Tensors& out) {
  const int64_t bytes = Errand(c.options.lane, Pass::forward, inputs_of(c.in, false),
                               outputs_of(out, false), c.options, how.ranks)
                            .saved_bytes();
  HostTensor t(DType::u8, {bytes});
  const auto base = reinterpret_cast<uintptr_t>(t.view().data);
  return base % 16 == 0
             ? t
             : HostTensor(DType::u8, {bytes}, {{}, 0, 16 - static_cast<int64_t>(base % 16)});
}

// The same bytes at another place within 256, as a caller may hand them on.
HostTensor moved(const HostTensor& from) {
  const auto place = [](const HostTensor& t) {
    return reinterpret_cast<uintptr_t>(t.view().data) % 256;
  };
  HostTensor to;
  int64_t before = 256;
  do {
    to = HostTensor(DType::u8, {from.elements()}, {{}, 0, before += 16});
  } while (place(to) == place(from) || place(to) % 16 != 0);
  std::memcpy(to.view().data, from.view().data, static_cast<size_t>(from.elements()));
  return to;
}

}  // namespace

Outcome run(const std::string& lane, const Case& given, const How& how) {
  Case c = given;
  c.options.lane = lane;
  Outcome o;
  Tensors in = c.in;
  if (how.forward) {
    Tensors out = make_outputs(c, forward_outputs(c), how);
    if (how.save) out["saved"] = room_for_saved(c, how, out);
    o.forward = call(Pass::forward, c, c.in, out, how, o.damage);
    if (how.save) in.insert_or_assign("saved", moved(out.at("saved")));
    o.out = out;
    o.out.erase("saved");
  }
  if (how.backward) {
    Tensors out = make_outputs(c, backward_outputs(c), how);
    o.backward = call(Pass::backward, c, in, out, how, o.damage);
    for (auto& [name, tensor] : out) o.out[name] = tensor;
  }
  return o;
}

Outcome run_step(const std::string& lane, const Case& c, const std::vector<int64_t>& slots) {
  talea::mamba3::StepArguments a;
  Tensors in = c.in, states;
  const auto squeeze = [](Tensor t, int axis) {
    if (!t) return t;
    for (int i = axis; i + 1 < t.rank; ++i) {
      t.shape[static_cast<size_t>(i)] = t.shape[static_cast<size_t>(i) + 1];
      t.stride[static_cast<size_t>(i)] = t.stride[static_cast<size_t>(i) + 1];
    }
    --t.rank;
    return t;
  };
  const auto full = inputs_of(in, false);
  a.in = full;
  a.in.initial_states = {};
  for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.z, &a.in.angles}) *t = squeeze(*t, 1);
  for (Tensor* t : {&a.in.adt, &a.in.dt, &a.in.trap}) *t = squeeze(*t, 2);
  Outcome o;
  o.out["out"] = fresh(c, "out");
  for (const char* name : {"angle", "ssm", "k", "v"})
    o.out[std::string("state_") + name] = in.at(std::string("initial_") + name);
  a.state = {o.out["state_angle"].view(), o.out["state_ssm"].view(), o.out["state_k"].view(),
             o.out["state_v"].view()};
  a.out = squeeze(o.out["out"].view(), 1);
  HostTensor rows(DType::i32, {static_cast<int64_t>(slots.size())});
  for (size_t i = 0; i < slots.size(); ++i)
    rows.set(static_cast<int64_t>(i), static_cast<double>(slots[i]));
  if (!slots.empty()) a.slots = rows.view();
  HostTensor status(DType::i64, {4});
  const bool counts = counts_on_device(lane);
  if (counts) a.status = status.view();
  Errand errand(lane, a, c.options);
  for (auto& [name, tensor] : in) errand.bring(tensor.bytes());
  for (auto& [name, tensor] : o.out) errand.bring(tensor.bytes());
  errand.bring(rows.bytes()), errand.bring(status.bytes());
  Room room(errand.workspace_bytes());
  errand.bring(room.block());
  o.forward = errand.run(room.workspace());
  if (counts) take_counts(c, status, o.forward);
  Case after = c;
  after.in = in;
  watch(c, after, o.out, room, o.damage);
  return o;
}

Tensors as_scanned(const Outcome& step) {
  Tensors named = {{"out", step.out.at("out")}};
  for (const char* name : {"angle", "ssm", "k", "v"})
    named[std::string("final_") + name] = step.out.at(std::string("state_") + name);
  return named;
}

std::string verify_step(const std::string& lane, const Case& c) {
  const Outcome step = run_step(lane, c, {});
  const Outcome yardstick = run("unfused", c, {.backward = false});
  return judge(c, as_scanned(step), oracle(c), yardstick.out) + step.damage;
}

std::string verify(const std::string& lane, const Case& c, const How& how) {
  return verify_draws(lane, c, 1, how);
}

std::string verify_draws(const std::string& lane, const Case& first, int draws, const How& how) {
  Values ours, truth, yardstick;
  std::string damage;
  How plain = how;
  plain.save = false;
  for (int i = 0; i < draws; ++i) {
    Case c = i == 0 ? first : drawn_again(first, static_cast<uint64_t>(i));
    append(truth, oracle(c));
    if (lane == "reference") c.options.chunk = 0;
    const Outcome own = run(lane, c, how);
    append(ours, own.out);
    damage += own.damage;
    if (own.forward.chunk_tokens > 0) c.options.chunk = own.forward.chunk_tokens;
    append(yardstick, run("unfused", c, plain).out);
  }
  const std::string said = judge(first, ours, truth, yardstick, counts_on_device(lane)) + damage;
  return said.empty() ? "" : describe_case(first) + "\n" + said;
}

std::string same_bits(const Tensors& a, const Tensors& b) {
  std::string said;
  int compared = 0;
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end()) continue;
    ++compared;
    if (tensor.shape() != other->second.shape()) {
      said += name + ": shapes differ\n";
      continue;
    }
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const double x = tensor.get(i), y = other->second.get(i);
      if (std::memcmp(&x, &y, sizeof x) == 0) continue;
      said += name + ": element " + std::to_string(i) + " is " + std::to_string(x) + " and " +
              std::to_string(y) + "\n";
      break;
    }
  }
  return compared == 0 ? "nothing was compared" : said;
}

}  // namespace talea::yardsticks::mamba3
