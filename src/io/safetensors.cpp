// What: the .safetensors format: header length, JSON header, elements.
// Why: every rule of the format is checked before a byte of data is read or memory taken for it.
// Never: accepts holes, overlaps, trailing bytes or a size that does not follow from the shape.
#include "io/safetensors.hpp"

#include <algorithm>
#include <set>

#include "core/fail.hpp"
#include "core/strict_json.hpp"
#include "io/atomic_file.hpp"

namespace talea::io {
namespace {

using json = nlohmann::json;
constexpr auto bad = ErrorKind::invalid_data;
constexpr int64_t header_limit_bytes = int64_t{32} << 20;
constexpr const char* metadata_key = "__metadata__";

struct Spelling {
  const char* name;
  int64_t bytes;
  int dtype;  // -1: known size, not read by this library
};

constexpr Spelling spellings[] = {{"F32", 4, int(DType::f32)},
                                  {"F64", 8, int(DType::f64)},
                                  {"BF16", 2, int(DType::bf16)},
                                  {"F16", 2, int(DType::f16)},
                                  {"I32", 4, int(DType::i32)},
                                  {"I64", 8, int(DType::i64)},
                                  {"BOOL", 1, -1},
                                  {"U8", 1, int(DType::u8)},
                                  {"I8", 1, -1},
                                  {"U16", 2, -1},
                                  {"I16", 2, -1},
                                  {"U32", 4, -1},
                                  {"U64", 8, -1},
                                  {"F8_E4M3", 1, int(DType::f8_e4m3)},
                                  {"F8_E5M2", 1, -1}};

const Spelling* spelling_of(const std::string& name) {
  for (const Spelling& s : spellings)
    if (name == s.name) return &s;
  return nullptr;
}

// A count in [0, 2^63).
int64_t count_of(const json& value, const std::string& where) {
  require(value.is_number_integer(), bad, "{}: not a whole number", where);
  require(value.is_number_unsigned(), bad, "{}: negative: {}", where, value.get<int64_t>());
  const uint64_t count = value.get<uint64_t>();
  require(count <= static_cast<uint64_t>(INT64_MAX), bad, "{}: {} does not fit in 63 bits", where,
          count);
  return static_cast<int64_t>(count);
}

// Bytes of a shape; extents of 0 do not hide an overflow.
int64_t bytes_of(const std::vector<int64_t>& shape, int64_t element, const std::string& where) {
  int64_t product = element;
  bool empty = false;
  for (const int64_t extent : shape) {
    empty = empty || extent == 0;
    require(extent == 0 || !__builtin_mul_overflow(product, extent, &product), bad,
            "{}.shape: {} overflows 64 bits", where, shape_text(shape));
  }
  return empty ? 0 : product;
}

SafetensorsEntry entry_of(const std::string& file, const std::string& name, const json& value) {
  const std::string where = fmt::format("{}: {}", file, quote(name));
  require(value.is_object(), bad, "{}: not an object", where);
  for (const auto& item : value.items())
    require(item.key() == "dtype" || item.key() == "shape" || item.key() == "data_offsets", bad,
            "{}: unknown field {}", where, quote(item.key()));
  for (const char* field : {"dtype", "shape", "data_offsets"})
    require(value.contains(field), bad, "{}: no field '{}'", where, field);
  SafetensorsEntry entry;
  entry.name = name;
  require(value["dtype"].is_string(), bad, "{}.dtype: not a string", where);
  entry.dtype = value["dtype"].get<std::string>();
  require(value["shape"].is_array(), bad, "{}.shape: not an array", where);
  for (const json& extent : value["shape"])
    entry.shape.push_back(count_of(extent, where + ".shape"));
  const json& offsets = value["data_offsets"];
  require(offsets.is_array() && offsets.size() == 2, bad, "{}.data_offsets: not a pair", where);
  entry.begin = count_of(offsets[0], where + ".data_offsets");
  entry.end = count_of(offsets[1], where + ".data_offsets");
  require(entry.begin <= entry.end, bad, "{}.data_offsets: [{}, {}] runs backwards", where,
          entry.begin, entry.end);
  if (const Spelling* spelling = spelling_of(entry.dtype)) {
    const int64_t bytes = bytes_of(entry.shape, spelling->bytes, where);
    require(bytes == entry.end - entry.begin, bad,
            "{}.data_offsets: [{}, {}] holds {} bytes, shape {} of {} needs {}", where, entry.begin,
            entry.end, entry.end - entry.begin, shape_text(entry.shape), entry.dtype, bytes);
  }
  return entry;
}

void check_metadata(const std::string& file, const json& value) {
  require(value.is_object(), bad, "{}: {}: not an object", file, metadata_key);
  for (const auto& item : value.items())
    require(item.value().is_string(), bad, "{}: {}.{}: not a string", file, metadata_key,
            quote(item.key()));
}

// The tensors, in order of their offsets, tile [0, data_bytes) without hole or overlap.
void check_tiling(const std::string& file, const std::vector<SafetensorsEntry>& entries,
                  int64_t data_bytes) {
  int64_t next = 0;
  for (const SafetensorsEntry& entry : entries) {
    require(entry.begin >= next, bad, "{}: {}.data_offsets: [{}, {}] overlaps what ends at {}",
            file, quote(entry.name), entry.begin, entry.end, next);
    require(entry.begin == next, bad, "{}: {}.data_offsets: [{}, {}] leaves a hole after {}", file,
            quote(entry.name), entry.begin, entry.end, next);
    require(entry.end <= data_bytes, bad,
            "{}: {}.data_offsets: [{}, {}] truncated: the data section has {} bytes", file,
            quote(entry.name), entry.begin, entry.end, data_bytes);
    next = entry.end;
  }
  require(next == data_bytes, bad, "{}: data: {} bytes that belong to no tensor", file,
          data_bytes - next);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : SafetensorsFile(Source::open(path)) {}

SafetensorsFile::SafetensorsFile(Source source) : source_(std::move(source)) {
  const std::string& file = source_.name();
  uint64_t length = 0;
  source_.read(0, &length, 8, "header length");
  require(length <= static_cast<uint64_t>(header_limit_bytes), bad,
          "{}: header length: {} bytes, at most {} are accepted", file, length, header_limit_bytes);
  const std::string text = source_.read_text(8, static_cast<int64_t>(length), "header");
  data_begin_ = 8 + static_cast<int64_t>(length);
  require(text.starts_with('{'), bad, "{}: header: does not begin with '{{'", file);
  const json header = parse_strict_json(file, text, 4);
  for (const auto& item : header.items()) {
    if (item.key() == metadata_key) {
      check_metadata(file, item.value());
    } else {
      entries_.push_back(entry_of(file, item.key(), item.value()));
    }
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_tiling(file, entries_, source_.size() - data_begin_);
}

const SafetensorsEntry& SafetensorsFile::find(const std::string& key) const {
  if (key.empty()) {
    require(entries_.size() == 1, bad, "{}: holds {} tensors; name one as FILE:KEY", source_.name(),
            entries_.size());
    return entries_.front();
  }
  for (const SafetensorsEntry& entry : entries_)
    if (entry.name == key) return entry;
  std::string names;
  for (size_t i = 0; i < entries_.size() && i < 8; ++i)
    names += (i ? ", " : "") + quote(entries_[i].name);
  fail(bad, "{}: no tensor {}; it holds {}{}", source_.name(), quote(key),
       names.empty() ? "none" : names, entries_.size() > 8 ? ", ..." : "");
}

HostTensor SafetensorsFile::read(const std::string& key) const {
  const SafetensorsEntry& entry = find(key);
  const std::string where = fmt::format("{}: {}", source_.name(), quote(entry.name));
  const Spelling* spelling = spelling_of(entry.dtype);
  require(spelling && spelling->dtype >= 0, bad,
          "{}.dtype: {} is not supported; one of F32, F64, BF16, F16, F8_E4M3, I32, I64, U8", where,
          quote(entry.dtype));
  require(entry.shape.size() <= max_rank, bad, "{}.shape: {} has more than {} dimensions", where,
          shape_text(entry.shape), max_rank);
  HostTensor tensor = allocate_tensor(static_cast<DType>(spelling->dtype), entry.shape);
  source_.read(data_begin_ + entry.begin, tensor.view.data, entry.end - entry.begin, where.c_str());
  return tensor;
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) header[metadata_key][key] = value;
  std::set<std::string> names{metadata_key, ""};
  int64_t offset = 0;
  for (const NamedTensor& named : tensors) {
    const std::string& name = named.name;
    const Tensor& tensor = named.tensor;
    require(names.insert(name).second, ErrorKind::usage,
            "{}: tensor name {}: empty, reserved or used twice", path, quote(name));
    const std::span shape(tensor.shape.data(), static_cast<size_t>(tensor.rank));
    const int64_t bytes = checked_bytes(tensor.dtype, shape);
    require(bytes >= 0, ErrorKind::usage, "{}: {}: shape {} cannot be written", path, quote(name),
            shape_text(tensor));
    const auto* spelling =
        std::find_if(std::begin(spellings), std::end(spellings),
                     [&](const Spelling& s) { return s.dtype == static_cast<int>(tensor.dtype); });
    header[name] = {
        {"dtype", spelling->name}, {"shape", shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8,
              ' ');  // elements stay aligned for readers that map the file
  const uint64_t length = text.size();
  AtomicFile file(path);
  file.write(&length, 8);
  file.write(text);
  for (const NamedTensor& named : tensors)
    for_each_row_major(named.tensor,
                       [&](const void* data, int64_t bytes) { file.write(data, bytes); });
  file.commit();
}

}  // namespace talea::io
