// What: the .npy format: magic, version, header length, a Python dict literal, then the elements.
// Why: the header is parsed by a grammar of exactly three keys, so nothing else can get in.
// Never: allocates for elements that the file does not hold.
#include "io/npy.hpp"

#include <bit>
#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "core/fail.hpp"
#include "io/atomic_file.hpp"

namespace talea::io {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are copied as they lie");
constexpr std::string_view magic = "\x93NUMPY";
constexpr int64_t header_limit_bytes = 1 << 16;

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } and white space.
class HeaderParser {
 public:
  HeaderParser(const std::string& file, std::string_view text) : file_(file), text_(text) {}

  Header parse() {
    expect('{');
    while (!accept('}')) {
      const std::string key = parse_string("header");
      expect(':');
      parse_value(key);
      if (accept('}')) break;
      expect(',');
    }
    skip_space();
    require(at_ == text_.size(), ErrorKind::invalid_data,
            "{}: header: unexpected bytes after the dictionary", file_);
    return std::move(header_);
  }

 private:
  void parse_value(const std::string& key) {
    if (key == "descr") {
      require_first(key, header_.descr.has_value());
      skip_space();
      require(peek() == '\'' || peek() == '"', ErrorKind::invalid_data,
              "{}: descr: structured dtypes are not supported", file_);
      header_.descr = parse_string("descr");
    } else if (key == "fortran_order") {
      require_first(key, header_.fortran_order.has_value());
      header_.fortran_order = parse_bool();
    } else if (key == "shape") {
      require_first(key, header_.shape.has_value());
      header_.shape = parse_shape();
    } else {
      fail(ErrorKind::invalid_data, "{}: header: unknown key '{}'", file_, key);
    }
  }

  void require_first(const std::string& key, bool seen) const {
    require(!seen, ErrorKind::invalid_data, "{}: header: key '{}' appears twice", file_, key);
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t'))
      ++at_;
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    require(accept(c), ErrorKind::invalid_data, "{}: header: '{}' expected at byte {}", file_, c,
            at_);
  }

  std::string parse_string(const char* field) {
    skip_space();
    const char quote = peek();
    require(quote == '\'' || quote == '"', ErrorKind::invalid_data,
            "{}: {}: a quoted string expected at byte {} of the header", file_, field, at_);
    const size_t end = text_.find(quote, at_ + 1);
    require(end != std::string_view::npos, ErrorKind::invalid_data, "{}: {}: string without an end",
            file_, field);
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    for (char& c : value)
      if (c < ' ' || c > '~') c = '?';  // the text goes into messages
    at_ = end + 1;
    return value;
  }

  bool parse_bool() {
    skip_space();
    const std::string_view rest = text_.substr(at_);
    const bool value = rest.starts_with("True");
    require(value || rest.starts_with("False"), ErrorKind::invalid_data,
            "{}: fortran_order: True or False expected", file_);
    at_ += value ? 4 : 5;
    return value;
  }

  std::vector<int64_t> parse_shape() {
    std::vector<int64_t> shape;
    require(accept('('), ErrorKind::invalid_data, "{}: shape: a tuple expected", file_);
    while (!accept(')')) {
      skip_space();
      const char* begin = text_.data() + at_;
      int64_t extent = 0;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), extent);
      require(error != std::errc::result_out_of_range, ErrorKind::invalid_data,
              "{}: shape: dimension {} does not fit in 64 bits", file_, shape.size());
      require(error == std::errc(), ErrorKind::invalid_data, "{}: shape: dimension {} is no number",
              file_, shape.size());
      require(extent >= 0, ErrorKind::invalid_data, "{}: shape: dimension {} is negative: {}",
              file_, shape.size(), extent);
      at_ += static_cast<size_t>(end - begin);
      shape.push_back(extent);
      if (accept(')')) break;
      require(accept(','), ErrorKind::invalid_data, "{}: shape: ',' expected at byte {}", file_,
              at_);
    }
    return shape;
  }

  const std::string& file_;
  std::string_view text_;
  size_t at_ = 0;
  Header header_;
};

DType dtype_of(const std::string& file, const std::string& descr) {
  if (descr == "<f4") return DType::f32;
  if (descr == "<f8") return DType::f64;
  if (descr == "<f2") return DType::f16;
  if (descr == "<i4") return DType::i32;
  if (descr == "<i8") return DType::i64;
  if (descr == "|u1") return DType::u8;
  fail(ErrorKind::invalid_data,
       "{}: descr: dtype '{}' is not supported; one of <f4, <f8, <f2, <i4, <i8, |u1 (bf16 and FP8: "
       "use "
       ".safetensors)",
       file, descr);
}

const char* descr_of(const std::string& file, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "<f4";
    case DType::f64:
      return "<f8";
    case DType::f16:
      return "<f2";
    case DType::i32:
      return "<i4";
    case DType::i64:
      return "<i8";
    case DType::u8:
      return "|u1";
    case DType::bf16:
    case DType::f8_e4m3:
      break;
  }
  fail(ErrorKind::usage, "{}: dtype {} has no .npy form; write .safetensors", file, name_of(dtype));
}

// Header text and the offset of the first element.
std::pair<std::string, int64_t> read_header(const Source& source) {
  const std::string start = source.read_text(0, 10, "magic");
  require(std::string_view(start).starts_with(magic), ErrorKind::invalid_data,
          "{}: magic: not a .npy file", source.name());
  const auto byte = [](char c) { return static_cast<int64_t>(static_cast<unsigned char>(c)); };
  const int64_t major = byte(start[6]), minor = byte(start[7]);
  require(major >= 1 && major <= 3 && minor == 0, ErrorKind::invalid_data,
          "{}: version: {}.{} is not supported; 1.0, 2.0 or 3.0", source.name(), major, minor);
  int64_t length = byte(start[8]) | byte(start[9]) << 8, begin = 10;
  if (major >= 2) {
    const std::string rest = source.read_text(10, 2, "header length");
    length |= byte(rest[0]) << 16 | byte(rest[1]) << 24;
    begin = 12;
  }
  require(length <= header_limit_bytes, ErrorKind::invalid_data,
          "{}: header length: {} bytes, at most {} are accepted", source.name(), length,
          header_limit_bytes);
  return {source.read_text(begin, length, "header"), begin + length};
}

}  // namespace

HostTensor read_npy(const Source& source) {
  const std::string& file = source.name();
  const auto [text, begin] = read_header(source);
  const Header header = HeaderParser(file, text).parse();
  require(header.descr.has_value(), ErrorKind::invalid_data, "{}: header: no 'descr'", file);
  require(header.fortran_order.has_value(), ErrorKind::invalid_data,
          "{}: header: no 'fortran_order'", file);
  require(header.shape.has_value(), ErrorKind::invalid_data, "{}: header: no 'shape'", file);
  const DType dtype = dtype_of(file, *header.descr);
  const std::vector<int64_t>& shape = *header.shape;
  require(shape.size() <= max_rank, ErrorKind::invalid_data,
          "{}: shape: {} has more than {} dimensions", file, shape_text(shape), max_rank);
  const int64_t bytes = checked_bytes(dtype, shape);
  require(bytes >= 0, ErrorKind::invalid_data, "{}: shape: {} overflows 64 bits", file,
          shape_text(shape));
  require(bytes == source.size() - begin, ErrorKind::invalid_data,
          "{}: data: {} bytes, shape {} of {} needs {}", file, source.size() - begin,
          shape_text(shape), name_of(dtype), bytes);
  HostTensor tensor = allocate_tensor(dtype, shape);
  source.read(begin, tensor.view.data, bytes, "data");
  if (*header.fortran_order) {
    int64_t stride = 1;
    for (int i = 0; i < tensor.view.rank; ++i) {
      tensor.view.stride[i] = stride;
      stride *= std::max<int64_t>(tensor.view.shape[i], 1);
    }
  }
  return tensor;
}

HostTensor read_npy(const std::string& path) { return read_npy(Source::open(path)); }

void write_npy(const std::string& path, const Tensor& tensor) {
  std::string shape;
  for (int i = 0; i < tensor.rank; ++i) shape += fmt::format("{}, ", tensor.shape[i]);
  if (tensor.rank > 1) shape.resize(shape.size() - 2);
  if (tensor.rank == 1) shape.resize(shape.size() - 1);
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                   descr_of(path, tensor.dtype), shape);
  // The format asks that elements start at a multiple of 64 and the header end with a new line.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string start(magic);
  start +=
      {'\1', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  AtomicFile file(path);
  file.write(start);
  file.write(header);
  for_each_row_major(tensor, [&](const void* data, int64_t bytes) { file.write(data, bytes); });
  file.commit();
}

}  // namespace talea::io
