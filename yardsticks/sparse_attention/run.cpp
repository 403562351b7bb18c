// What: runs one lane on one case and brings the outputs back, with everything around watched.
// Why: what must not be written is as much a result as what must.
// Never: judges the values.
#include "yardsticks/sparse_attention/run.hpp"

#include <cstring>

namespace talea::yardsticks::sparse_attention {
namespace {

std::vector<int> missing(bool batch, bool group, int group_at) {
  std::vector<int> without;
  if (batch) without.push_back(0);
  if (group) without.push_back(group_at);
  return without;
}

bool pages(const Case& c) { return c.table || c.options.index_space == sa::IndexSpace::slots; }

struct Watched {
  const char* name;
  Grid* grid;
  std::vector<std::byte> before;
};

class Watch {
 public:
  // Outputs: what lies around them. Inputs: every byte.
  void add(const char* name, Grid& g, bool output) {
    if (g) list_.push_back({name, &g, output ? g.outside() : g.memory()});
    outputs_.push_back(output);
    if (!g) outputs_.pop_back();
  }
  std::string damage() const {
    std::string text;
    for (size_t i = 0; i < list_.size(); ++i) {
      const Watched& w = list_[i];
      const bool same = outputs_[i] ? w.grid->outside() == w.before : w.grid->memory() == w.before;
      if (!same) text += std::string(w.name) + (outputs_[i] ? ": guards written; " : ": changed; ");
    }
    return text;
  }

 private:
  std::vector<Watched> list_;
  std::vector<bool> outputs_;
};

Grid output(DType dtype, std::vector<int64_t> shape, Lay lay) {
  Grid g(dtype, std::move(shape), lay);
  g.fill_bytes(0xff);
  return g;
}

}  // namespace

Home::Home(Place* place) : place_(place) {
  if (place_) place_->reset();
}

Tensor Home::tensor(const Grid& g, std::vector<int> without) {
  if (!place_ || !g) return g.tensor(std::move(without));
  const auto bytes = static_cast<int64_t>(g.memory().size());
  auto* there = static_cast<char*>(place_->allocate(bytes));
  place_->upload(there, g.memory().data(), bytes);
  copies_.push_back({&g, there});
  Tensor t = g.tensor(std::move(without), there + (g.bytes() - g.memory().data()));
  t.device = place_->kind();
  return t;
}

void Home::fetch() {
  for (const Copy& c : copies_)
    place_->download(const_cast<std::byte*>(c.grid->memory().data()), c.there,
                     static_cast<int64_t>(c.grid->memory().size()));
}

Room::Room(int64_t bytes, Place* place)
    : bytes_(bytes), memory_(static_cast<size_t>(bytes / 8 + 24), ~uint64_t{0}), place_(place) {
  if (!place_) return;
  there_ = static_cast<char*>(place_->allocate(static_cast<int64_t>(memory_.size() * 8)));
  place_->upload(there_, memory_.data(), static_cast<int64_t>(memory_.size() * 8));
}
Workspace Room::workspace() {
  auto address =
      place_ ? reinterpret_cast<uintptr_t>(there_) : reinterpret_cast<uintptr_t>(memory_.data());
  address += 8 - address % 16 + (address % 16 > 8 ? 16 : 0);
  return {bytes_ ? reinterpret_cast<void*>(address) : nullptr, bytes_};
}
bool Room::intact() {
  if (place_) place_->download(memory_.data(), there_, static_cast<int64_t>(memory_.size() * 8));
  const auto* bytes = reinterpret_cast<const unsigned char*>(memory_.data());
  const size_t size = memory_.size() * 8;
  for (size_t i = static_cast<size_t>(bytes_) + 24; i < size; ++i)
    if (bytes[i] != 0xff) return false;
  return true;
}

sa::Inputs inputs_of(const Case& c) {
  Home host;
  return inputs_of(c, host);
}

sa::Inputs inputs_of(const Case& c, Home& home) {
  const bool nb = c.without_batch, ng = c.without_group, paged = pages(c);
  sa::Inputs in;
  in.q = home.tensor(c.q, missing(nb, false, 0));
  in.kv = home.tensor(c.kv, missing(nb && !paged, ng, 2));
  in.indices = home.tensor(c.indices, missing(nb, ng, 2));
  const auto row = missing(nb, false, 0);
  if (c.q_scale) in.q_scale = home.tensor(c.q_scale, row);
  if (c.kv_scale)
    in.kv_scale =
        home.tensor(c.kv_scale, missing(nb && !paged && !c.kv_scale.shape().empty(), false, 0));
  if (c.topk_length) in.topk_length = home.tensor(c.topk_length, row);
  if (c.sink) in.sink = home.tensor(c.sink);
  if (c.cu_q) in.cu_seqlens_q = home.tensor(c.cu_q), in.cu_seqlens_k = home.tensor(c.cu_k);
  if (c.positions) in.q_positions = home.tensor(c.positions, row);
  if (c.table) in.block_table = home.tensor(c.table, row), in.kv_lengths = home.tensor(c.lengths);
  if (c.d_o) in.d_o = home.tensor(c.d_o, row);
  if (c.d_lse) in.d_lse = home.tensor(c.d_lse, row);
  return in;
}

std::string declines(const Case& c, const std::string& lane, Place* place) {
  Home home(place);
  sa::Options o = c.options;
  o.lane = lane;
  Grid out(c.o_dtype, {c.batch(), c.queries(), c.heads(), c.value_dim()});
  sa::Outputs outputs;
  outputs.o = home.tensor(out);
  sa::Inputs in = inputs_of(c, home);
  in.d_o = in.d_lse = {};
  const auto choice = sa::explain(sa::describe(sa::Pass::forward, in, outputs, o));
  return choice.lane.empty() ? choice.declined.back().reason : "";
}

Outcome run_lane(const Case& input, const std::string& lane, int threads, Place* place) {
  Case c = input;
  Home home(place);
  const Stream stream = place ? place->stream() : nullptr;
  const auto rows = missing(c.without_batch, false, 0);
  sa::Options o = c.options;
  o.lane = lane;
  o.threads = threads;
  const std::vector<int64_t> per_row = {c.batch(), c.queries(), c.heads()};
  const std::vector<int64_t> wide = {c.batch(), c.queries(), c.heads(), c.value_dim()};
  const DType side = c.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  Grid out_o = output(c.o_dtype, wide, c.out_lay), residual,
       lse = output(side, per_row, Lay::dense);
  Grid row_max = output(side, per_row, Lay::dense), status(DType::i64, {4});
  if (c.residual) residual = output(c.o_dtype, wide, c.out_lay);
  status.put_integer(-1, 1);
  Watch watch;
  for (const auto& [name, grid] :
       std::initializer_list<std::pair<const char*, Grid*>>{{"q", &c.q},
                                                            {"q_scale", &c.q_scale},
                                                            {"kv", &c.kv},
                                                            {"kv_scale", &c.kv_scale},
                                                            {"indices", &c.indices},
                                                            {"topk_length", &c.topk_length},
                                                            {"sink", &c.sink},
                                                            {"d_o", &c.d_o},
                                                            {"d_lse", &c.d_lse}})
    watch.add(name, *grid, false);
  for (const auto& [name, grid] : std::initializer_list<std::pair<const char*, Grid*>>{
           {"o", &out_o}, {"o_residual", &residual}, {"lse", &lse}, {"row_max", &row_max}})
    watch.add(name, *grid, true);
  sa::Inputs in = inputs_of(c, home);
  sa::Inputs first = in;
  first.d_o = first.d_lse = {};
  sa::Outputs out;
  out.o = home.tensor(out_o, rows);
  if (c.residual) out.o_residual = home.tensor(residual, rows);
  out.lse = home.tensor(lse, rows);
  out.row_max = home.tensor(row_max, rows);
  out.status = home.tensor(status);
  Outcome result;
  result.on_device = place != nullptr;
  Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, first, out, o)), place);
  result.forward = sa::forward(first, out, o, room.workspace(), {}, stream);
  home.fetch();
  if (!room.intact()) result.damage += "forward: wrote behind its workspace; ";
  result.damage += watch.damage();
  result.o = out_o.numbers();
  result.lse = lse.numbers();
  result.row_max = row_max.numbers();
  result.o_residual = residual.numbers();
  for (int64_t i = 0; i < 4; ++i) result.status.push_back(status.integer(i));
  if (result.forward.slots_foreign < 0) {  // the count stayed on the device: in the status
    result.forward.slots_foreign = result.status[0];
    result.forward.first_foreign_slot = result.status[1];
  }
  if (!c.backward()) return result;

  Grid dq = output(c.dq_dtype, c.q.shape(), c.out_lay);
  Grid dkv = c.accumulate
                 ? c.dkv_before
                 : output(c.dkv_dtype, {c.kv.shape()[0], c.kv.shape()[1], c.groups(), c.dim()},
                          c.out_lay == Lay::swapped ? Lay::dense : c.out_lay);
  Grid d_sink = output(side, {c.heads()}, Lay::dense);
  Watch second;
  second.add("dq", dq, true), second.add("dkv", dkv, true), second.add("d_sink", d_sink, true);
  if (c.saved) {
    in.o = out.o;
    in.lse = out.lse;
    if (c.residual) in.o_residual = out.o_residual;
  }
  sa::Outputs grad;
  grad.dq = home.tensor(dq, rows);
  grad.dkv = home.tensor(dkv, missing(c.without_batch && !pages(c), c.without_group, 2));
  grad.accumulate_dkv = c.accumulate;
  if (c.sink) grad.d_sink = home.tensor(d_sink);
  if (sa::explain(sa::describe(sa::Pass::backward, in, grad, o)).lane.empty()) o.lane = "auto";
  Room more(sa::workspace_bytes(sa::describe(sa::Pass::backward, in, grad, o)), place);
  result.backward = sa::backward(in, grad, o, more.workspace(), {}, stream);
  home.fetch();
  if (!more.intact()) result.damage += "backward: wrote behind its workspace; ";
  result.damage += watch.damage() + second.damage();
  result.dq = dq.numbers();
  result.dkv = dkv.numbers();
  if (c.sink) result.d_sink = d_sink.numbers();
  return result;
}

}  // namespace talea::yardsticks::sparse_attention
