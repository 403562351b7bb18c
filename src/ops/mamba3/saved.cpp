// What: the opaque tensor that forward hands to backward: a mark of whose it is, checkpoints, and over
//       ranks of tokens what they told each other.
// Why: a tensor of another lane, chunk or problem is an error, not wrong gradients.
// Never: read by anyone but who wrote it: the lane, and the ranks around it.
#include "ops/mamba3/saved.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/fail.hpp"

namespace talea::mamba3 {
namespace {

struct Mark {
  char magic[8];
  uint64_t lane, problem;
  int64_t bytes;
  char rest[32];
};
static_assert(sizeof(Mark) == saved_mark_bytes);

uint64_t hashed(const std::string& text) {  // FNV-1a
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

Mark mark_of(const Problem& p, const std::string& lane, const Planned& plan) {
  const std::string problem =
      fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", p.batch, p.tokens, p.heads,
                  p.groups, p.rank, p.state_dim, p.head_dim, p.pairs, p.sequences,
                  static_cast<int>(p.rotary_pairs), static_cast<int>(p.dtype), p.options.chunk,
                  p.options.workspace_limit_bytes, p.token_begin, p.head_offset);
  return {{'t', 'a', 'l', 'e', 'a', 'm', '3', '1'},
          hashed(lane),
          hashed(problem),
          saved_size(plan),
          {}};
}

void check_size(const Tensor& t, int64_t bytes) {
  require(t.rank == 1 && t.contiguous() && t.shape[0] == bytes, ErrorKind::invalid_data,
          "saved: {} bytes{} where {} contiguous bytes are needed", t.elements(),
          t.contiguous() ? "" : " that are not contiguous", bytes);
  require(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, ErrorKind::invalid_data,
          "saved: its address is no multiple of 16 bytes");
}

void behind_mark(Tensor& t) {
  t.data = static_cast<char*>(t.data) + saved_mark_bytes;
  t.shape[0] -= saved_mark_bytes;
}

}  // namespace

int64_t saved_size(const Planned& plan) { return saved_mark_bytes + plan.kept_bytes; }

void take_saved(const Problem& p, const std::string& lane, const Planned& plan, FullAxes& full,
                Result& result) {
  Tensor& written = full.out.saved;
  Tensor& read = full.in.saved;
  if (!written && !read) return;
  const Mark own = mark_of(p, lane, plan);
  result.saved_bytes = own.bytes;
  result.states_from_saved = read.present && plan.kept_bytes > 0;  // not all lanes keep states
  if (written) {
    check_size(written, own.bytes);
    if (p.device == DeviceKind::cpu) std::memcpy(written.data, &own, sizeof own);
    behind_mark(written);
  }
  if (!read) return;
  check_size(read, own.bytes);
  if (p.device == DeviceKind::cpu) {
    Mark mark;
    std::memcpy(&mark, read.data, sizeof mark);
    require(std::memcmp(mark.magic, own.magic, sizeof mark.magic) == 0, ErrorKind::invalid_data,
            "saved: was not written by a forward call");
    require(mark.lane == own.lane, ErrorKind::invalid_data,
            "saved: was written by another lane than {}", lane);
    require(mark.problem == own.problem, ErrorKind::invalid_data,
            "saved: was written for other sizes, another chunk or workspace limit");
  }
  behind_mark(read);
}

std::string memory_order_of(const Problem& p) {
  const Tensor& q = p.in.q;
  const char* names = p.rank_axis ? "bsrgn" : "bsgn";
  std::array<int, max_rank> order{0, 1, 2, 3, 4};
  std::stable_sort(order.begin(), order.begin() + q.rank,
                   [&](int a, int b) { return q.stride[a] > q.stride[b]; });
  std::string text;
  for (int i = 0; i < q.rank; ++i) text += std::string(i ? " " : "") + names[order[i]];
  return text;
}

}  // namespace talea::mamba3
