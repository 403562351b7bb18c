// What: see sizes.hpp.
// Why: see sizes.hpp.
// Never: computes.
#include "sizes.hpp"

#include <CLI/CLI.hpp>

#include "core/fail.hpp"
#include "files.hpp"

namespace talea::cli {

void SparseSizes::add(CLI::App& sub) {
  const auto size = CLI::Range(int64_t{0}, int64_t{1} << 40);
  const auto count = [&](const char* flag, int64_t& to, const char* help) {
    sub.add_option(flag, to, help)->check(size)->capture_default_str();
  };
  count("--tokens", tokens, "queries");
  count("--keys", keys, "rows of kv");
  count("--heads", heads, "of the attention");
  count("--dim", dim, "columns of a row of kv");
  count("--value-dim", value_dim, "columns of a row that are its value");
  count("--top-k", top_k, "slots of a query");
  count("--index-heads", index_heads, "of the indexer");
  count("--index-dim", index_dim, "columns of the indexer");
  sub.add_option("--pass", pass, "which of the passes")
      ->check(CLI::IsMember({"forward", "backward", "select", "index_loss"}))
      ->capture_default_str();
  sub.add_option("--workspace-limit", workspace_limit, "bytes, e.g. 64MiB")->capture_default_str();
}

void SparseSizes::note_unread_sizes(const Context& context, const CLI::App& sub) const {
  const std::string why = "no size of --pass " + pass;
  if (pass == "select") note_unread(context, sub, {"--heads", "--dim", "--value-dim"}, why);
  if (pass == "index_loss") note_unread(context, sub, {"--value-dim"}, why);
  if (pass == "forward" || pass == "backward")
    note_unread(context, sub, {"--index-heads", "--index-dim"}, why);
}

SparseTensors tensors_of(const SparseSizes& z, const std::string& lane, const Place& place) {
  SparseTensors t;
  t.pass = choice<sa::Pass>(z.pass, {"forward", "backward", "select", "index_loss"});
  const DType kind = parse_dtype(z.dtype);
  const int64_t n = z.tokens, h = z.heads, k = z.top_k;
  t.attention.options.workspace_limit_bytes = t.select.options.workspace_limit_bytes =
      t.loss.options.workspace_limit_bytes = parse_bytes("--workspace-limit", z.workspace_limit);
  if (t.pass == sa::Pass::forward || t.pass == sa::Pass::backward) {
    sa::Inputs& in = t.attention.in;
    sa::Outputs& out = t.attention.out;
    in.q = place(kind, {n, h, z.dim});
    in.kv = place(kind, {z.keys, z.dim});
    in.indices = place(DType::i32, {n, k});
    t.attention.options.value_dim = z.value_dim;
    t.attention.options.lane = lane;
    const Tensor o = place(kind, {n, h, z.value_dim}), lse = place(DType::f32, {n, h});
    if (t.pass == sa::Pass::forward) {
      out.o = o, out.lse = lse;
      return t;
    }
    in.o = o, in.lse = lse;
    in.d_o = place(kind, {n, h, z.value_dim});
    out.dq = place(kind, {n, h, z.dim});
    out.dkv = place(kind, {z.keys, z.dim});
    return t;
  }
  const Tensor q = place(kind, {n, z.index_heads, z.index_dim});
  const Tensor keys = place(kind, {z.keys, z.index_dim});
  const Tensor weights = place(DType::f32, {n, z.index_heads});
  const Tensor indices = place(DType::i32, {n, k}), length = place(DType::i32, {n});
  if (t.pass == sa::Pass::select) {
    t.select.in.index_q = q, t.select.in.index_k = keys, t.select.in.index_weights = weights;
    t.select.out.indices = indices, t.select.out.topk_length = length;
    t.select.options.top_k = k;
    t.select.options.lane = lane;
    return t;
  }
  sa::IndexLossInputs& in = t.loss.in;
  in.index_q = q, in.index_k = keys, in.index_weights = weights;
  in.q = place(kind, {n, h, z.dim});
  in.kv = place(kind, {z.keys, z.dim});
  in.indices = indices;
  t.loss.out.loss = place(kind == DType::f64 ? DType::f64 : DType::f32, {});
  t.loss.out.dindex_q = place(kind, {n, z.index_heads, z.index_dim});
  t.loss.out.dindex_k = place(kind, {z.keys, z.index_dim});
  t.loss.out.dindex_weights = place(DType::f32, {n, z.index_heads});
  t.loss.options.lane = lane;
  return t;
}

sa::Problem SparseTensors::problem() const {
  if (pass == sa::Pass::select) return sa::describe(select.in, select.out, select.options);
  if (pass == sa::Pass::index_loss) return sa::describe(loss.in, loss.out, loss.options);
  return sa::describe(pass, attention.in, attention.out, attention.options);
}

sa::Result SparseTensors::run(Workspace space) const {
  if (pass == sa::Pass::select) return sa::select(select.in, select.out, select.options, space);
  if (pass == sa::Pass::index_loss) return sa::index_loss(loss.in, loss.out, loss.options, space);
  const auto call = pass == sa::Pass::forward ? sa::forward : sa::backward;
  return call(attention.in, attention.out, attention.options, space, {}, nullptr);
}

}  // namespace talea::cli
