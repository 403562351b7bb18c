// What: `talea explain --operator sparse_attention`: which lane a pass would take, and what it
// costs.
// Why: a choice that cannot be asked about is a choice in silence.
// Never: touches data; the tensors have addresses nobody reads.
#include <CLI/CLI.hpp>

#include "../lane_choices.hpp"
#include "../table.hpp"
#include "io/host_tensor.hpp"
#include "register.hpp"
#include "sizes.hpp"

namespace talea::cli {
namespace {

struct Flags {
  SparseSizes sizes;
  std::string device = "cpu", lane = "auto";
};

// Tensors at made-up addresses that do not overlap.
Place made_up(DeviceKind device) {
  return
      [device, next = uintptr_t{4096}](DType dtype, std::initializer_list<int64_t> shape) mutable {
        const Tensor t = make_tensor(reinterpret_cast<void*>(next), dtype, shape, device);
        double bytes = static_cast<double>(size_of(dtype));
        for (const int64_t extent : shape) bytes *= static_cast<double>(extent);
        require(bytes < 0x1p58, ErrorKind::usage, "shape {}: more bytes than 64 bits can count",
                io::shape_text(t));
        next += (static_cast<uintptr_t>(bytes) / 4096 + 2) * 4096;
        return t;
      };
}

LaneChoice choice_of(const Flags& f, const std::string& lane) {
  const auto device = f.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  return sa::explain(tensors_of(f.sizes, lane, made_up(device)).problem());
}

void run(Context& context, const Flags& f) {
  const LaneChoices choices =
      ask_lanes(sa::lanes(), f.lane, [&](const std::string& lane) { return choice_of(f, lane); });
  const SparseSizes& z = f.sizes;
  const double dense = 4.0 * static_cast<double>(z.tokens) * static_cast<double>(z.keys) *
                       static_cast<double>(z.heads);
  const auto title = [&](const std::string& flops) {
    return fmt::format(
        "{} of {} queries over {} of {} keys, {} heads, {}/{}, {} on {}: {} flops; dense fp32 "
        "scores would take {}",
        z.pass, grouped(z.tokens), grouped(z.top_k), grouped(z.keys), z.heads, z.dim, z.value_dim,
        z.dtype, f.device, flops, human_bytes(static_cast<int64_t>(dense)));
  };
  print_choices(context, {{"operator", "sparse_attention"}, {"pass", z.pass}}, title, choices);
}

}  // namespace

LaneChoice ordinary_sparse_attention(const std::string& lane, DeviceKind where) {
  SparseSizes sizes;
  sizes.workspace_limit = "1024GiB";  // not the question here
  if (where == DeviceKind::cuda) sizes.dtype = "bf16";
  return sa::explain(tensors_of(sizes, lane, made_up(where)).problem());
}

void register_explain_sparse_attention(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub =
      add_subcommand(app, context,
                     {"explain", "which lane a pass would take, why, and what it would cost",
                      "talea explain --operator sparse_attention --tokens 4096 --keys 8192 --heads "
                      "128 --top-k 2048",
                      ""});
  f->sizes.add(*sub);
  sub->add_option("--dtype", f->sizes.dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  sub->add_option("--device", f->device, "where the tensors lie")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  sub->add_option("--lane", f->lane, "auto, or a lane by name")->capture_default_str();
  sub->callback([f, sub, &context] {
    f->sizes.note_unread_sizes(context, *sub);
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
