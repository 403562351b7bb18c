// What: a hash of every field that ranks must share, and the exchange that names a difference.
// Why: one small exchange a call is the price; the text travels only when the hashes differ.
// Never: continues after a disagreement, or keeps an error to itself that others wait behind.
#include "dist/agree.hpp"

#include <array>

#include "core/fail.hpp"
#include "core/half.hpp"

namespace talea {
namespace {

constexpr auto bad = ErrorKind::invalid_data;
constexpr uint64_t hash_seed = 0xcbf29ce484222325u;
constexpr uint64_t refused = 0;  // in place of a hash: this rank does not make the call

uint64_t hash(uint64_t h, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3u;
  return h;
}

uint64_t hash_of(const std::vector<AgreedField>& fields) {
  uint64_t h = hash_seed;
  for (const AgreedField& f : fields) h = hash(h, f.value.c_str(), f.value.size() + 1);
  return h == refused ? 1 : h;
}

// Why a rank does not make the call; empty: it does.
struct Said {
  int32_t kind = 0;
  char text[1020] = {};
};

Said said(const std::exception& e) {
  const auto* own = dynamic_cast<const Error*>(&e);
  Said s{static_cast<int32_t>(own ? own->kind() : ErrorKind::runtime)};
  std::strncpy(s.text, e.what(), sizeof s.text - 1);
  return s;
}

std::vector<Said> gather_said(const Said& own, Communicator& c) {
  std::vector<Said> all(static_cast<size_t>(c.size()));
  c.host_gather(&own, all.data(), sizeof own);
  return all;
}

// As agree_bytes() and what follows it there, by a rank that cannot take part.
void refuse(const Said& why, Meeting& m) {
  if (m.met || !m.with_others()) return;
  m.met = true;
  const size_t each = sizeof refused + m.own_bytes;
  const std::vector<std::byte> hello(each);
  std::vector<std::byte> all(each * static_cast<size_t>(m.ranks->size()));
  if (m.ranks->host_gather(hello.data(), all.data(), static_cast<int64_t>(each)))
    gather_said(why, *m.ranks);
}

void name_refusal(Communicator& c) {
  const std::vector<Said> all = gather_said({}, c);
  for (size_t r = 0; r < all.size(); ++r)
    require(all[r].text[0] == 0, static_cast<ErrorKind>(all[r].kind), "rank {}: {}", r,
            all[r].text);
}

// Every rank sends its fields as text; the first that differs from rank 0's is named on all ranks.
void name_difference(const std::vector<AgreedField>& fields, Communicator& c) {
  struct Text {
    char value[64];
  };
  for (const AgreedField& field : fields) {
    Text own{};
    std::strncpy(own.value, field.value.c_str(), sizeof own.value - 1);
    std::vector<Text> all(static_cast<size_t>(c.size()));
    require(c.host_gather(&own, all.data(), sizeof own), ErrorKind::runtime,
            "{} of rank {}: its host channel failed", c.engine(), c.rank());
    for (int r = 1; r < c.size(); ++r)
      require(std::strcmp(all[r].value, all[0].value) == 0, bad,
              "{}: the ranks disagree: {} on rank 0, {} on rank {}", field.name, all[0].value,
              all[r].value, r);
  }
}

}  // namespace

std::string content_of(const Tensor& t) {
  if (!t) return "absent";
  if (t.device != DeviceKind::cpu) return "present";
  uint64_t h = hash_seed;
  std::array<int64_t, max_rank> index{};
  int64_t at = 0;
  for (int64_t n = t.elements(); n > 0; --n) {  // row-major
    const double value = load_element(t.data, t.dtype, at);
    h = hash(h, &value, sizeof value);
    for (int d = t.rank - 1; d >= 0; --d) {
      at += t.stride[d];
      if (++index[d] < t.shape[d]) break;
      at -= t.stride[d] * t.shape[d];
      index[d] = 0;
    }
  }
  return fmt::format("content hash {:016x}", h);
}

std::optional<std::vector<std::byte>> agree_bytes(const std::vector<AgreedField>& fields,
                                                  std::span<const std::byte> own,
                                                  Meeting& meeting) {
  Communicator& c = *meeting.ranks;
  meeting.met = true;
  const uint64_t hashed = hash_of(fields);
  const size_t each = sizeof hashed + own.size(), ranks = static_cast<size_t>(c.size());
  std::vector<std::byte> hello(each), all(each * ranks), values(own.size() * ranks);
  std::memcpy(hello.data(), &hashed, sizeof hashed);
  if (!own.empty()) std::memcpy(hello.data() + sizeof hashed, own.data(), own.size());
  if (!c.host_gather(hello.data(), all.data(), static_cast<int64_t>(each))) return std::nullopt;
  bool same = true, refusal = false;
  for (size_t r = 0; r < ranks; ++r) {
    same = same && std::memcmp(all.data() + r * each, all.data(), sizeof hashed) == 0;
    refusal = refusal || std::memcmp(all.data() + r * each, &refused, sizeof refused) == 0;
    if (!own.empty())
      std::memcpy(values.data() + r * own.size(), all.data() + r * each + sizeof hashed,
                  own.size());
  }
  if (refusal) name_refusal(c);
  if (!same) {
    name_difference(fields, c);
    fail(bad, "the ranks' settings differ (hash {:016x} on rank {}) in no field that can be shown",
         hashed, c.rank());
  }
  return values;
}

std::string not_compared(const Meeting& meeting) {
  return fmt::format("handshake: not run; communicator {} has no channel for host memory",
                     meeting.ranks->engine());
}

void tell_if_it_fails(std::span<Meeting> groups, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& e) {
    const Said why = said(e);
    for (Meeting& m : groups) fails([&] { refuse(why, m); });  // its own error comes first
    throw;
  }
}

bool fails(const std::function<void()>& alone) {
  try {
    alone();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

}  // namespace talea
