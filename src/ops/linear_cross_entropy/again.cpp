// What: a call that is checked and planned once, and made again with other addresses.
// Why: what depends on addresses is little: whether they are aligned and lie apart.
// Never: says an error of its own: a call that looks wrong is made in full, which says what is.
#include "ops/linear_cross_entropy/again.hpp"

#include "ops/linear_cross_entropy/fields.hpp"

namespace talea::lce {

constexpr uintptr_t kAligned = 16;  // beyond that no lane looks

Again::Again(const Inputs& in, const Outputs& out, const Options& options, int64_t workspace_bytes)
    : in_(in), out_(out), options_(options), workspace_bytes_(workspace_bytes) {
  Problem p = lce::describe(in, out, options, Ranks{});
  p.alignment_bytes = kAligned;
  const Workspace room{nullptr, workspace_bytes};
  ready_ = prepare<Operator>(p, &room);
  const int64_t needed = ready_.plan.workspace_bytes;
  require(workspace_bytes >= needed, ErrorKind::usage,
          "workspace: {} bytes given, {} bytes needed by lane {}", workspace_bytes, needed,
          ready_.lane->name);
  const auto add = [&](const Tensor& t, bool written) {
    Extent e{0, 0, written};
    for (int i = 0; i < t.rank; ++i) {
      const int64_t reach = (t.shape[i] - 1) * t.stride[i] * size_of(t.dtype);
      (reach < 0 ? e.first : e.last) += reach;
    }
    e.last += size_of(t.dtype);
    if (t.elements() == 0) e.first = e.last = 0;
    extents_.push_back(e);
  };
  for (const auto& f : input_fields)
    if (in.*f.member) given_.push_back(f.member), add(in.*f.member, false);
  for (const auto& f : output_fields)
    if (out.*f.member) asked_.push_back(f.member), add(out.*f.member, true);
}

bool Again::apart(std::span<void* const> addresses, const void* workspace) const {
  const auto room = reinterpret_cast<uintptr_t>(workspace);
  const int64_t needed = ready_.plan.workspace_bytes;
  if (!workspace && needed > 0) return false;
  uintptr_t bits = 0;
  for (size_t i = 0; i < addresses.size(); ++i) {
    const auto at = reinterpret_cast<uintptr_t>(addresses[i]);
    const Extent& e = extents_[i];
    if (e.first == e.last) continue;
    if (at == 0) return false;
    bits |= at;
    const uintptr_t first = at + static_cast<uintptr_t>(e.first),
                    last = at + static_cast<uintptr_t>(e.last);
    const auto crosses = [&](uintptr_t from, uintptr_t to) { return from < last && first < to; };
    if (crosses(room, room + static_cast<uintptr_t>(needed))) return false;
    for (size_t k = 0; k < i; ++k) {
      const Extent& other = extents_[k];
      const auto base = reinterpret_cast<uintptr_t>(addresses[k]);
      if ((e.written || other.written) && crosses(base + static_cast<uintptr_t>(other.first),
                                                  base + static_cast<uintptr_t>(other.last)))
        return false;
    }
  }
  return bits % kAligned == 0;
}

void Again::run(std::span<void* const> addresses, void* workspace, Stream stream) const {
  Inputs in = in_;
  Outputs out = out_;
  size_t i = 0;
  for (const auto member : given_) (in.*member).data = addresses[i++];
  for (const auto member : asked_) (out.*member).data = addresses[i++];
  const Workspace room{workspace, workspace_bytes_};
  if (!apart(addresses, workspace)) {
    linear_cross_entropy(in, out, options_, room, {}, stream);
    return;
  }
  Result nobody_reads;  // names no lane, by which lanes know it
  Communicator& alone = self_communicator();
  ready_.lane->run({.problem = ready_.problem,
                    .device = ready_.device,
                    .in = in,
                    .out = out,
                    .workspace = room,
                    .vocab = alone,
                    .batch = alone,
                    .stream = stream,
                    .result = nobody_reads},
                   ready_.plan);
}

}  // namespace talea::lce
