// What: .safetensors round trips, the FILE:KEY grammar and a table of hostile files.
// Why: the header is JSON from a stranger; each rule of the format has a file that breaks it.
// Never: needs the safetensors package; the bytes are written out here.
#include "io/safetensors.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "io/read_tensor.hpp"
#include "support/expect_error.hpp"
#include "support/temp_dir.hpp"

namespace talea::io {
namespace {

using testing::expect_error;
using testing::TempDir;

std::string file_of(const std::string& header, const std::string& data) {
  uint64_t length = header.size();
  return std::string(reinterpret_cast<char*>(&length), 8) + header + data;
}

// The file is built and the tensor `key` read.
void parse(const std::string& bytes, const std::string& key = "") {
  SafetensorsFile(Source::memory("x.safetensors", bytes)).read(key);
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(Safetensors, RoundTripsSeveralTensors) {
  const TempDir dir;
  std::vector<HostTensor> tensors;
  std::vector<NamedTensor> named;
  const DType dtypes[] = {DType::bf16, DType::f32, DType::f16, DType::f64, DType::i32, DType::i64};
  for (const DType dtype : dtypes) {
    tensors.push_back(allocate_tensor(dtype, {3, 5}));
    for (int64_t i = 0; i < 15; ++i) store_element(tensors.back().view.data, dtype, i, double(i));
    named.push_back({std::string("t.") + name_of(dtype), tensors.back().view});
  }
  const HostTensor scalar = allocate_tensor(DType::f32, {}),
                   empty = allocate_tensor(DType::f32, {0, 4});
  named.push_back({"scalar", scalar.view});
  named.push_back({"empty", empty.view});
  const std::string path = dir.file("t.safetensors");
  write_safetensors(path, named, {{"written_by", "a \"test\""}});
  const SafetensorsFile file(path);
  ASSERT_EQ(file.entries().size(), named.size());
  for (const NamedTensor& want : named) {
    const HostTensor got = file.read(want.name);
    EXPECT_EQ(got.view.dtype, want.tensor.dtype);
    EXPECT_EQ(shape_text(got.view), shape_text(want.tensor));
    EXPECT_EQ(std::memcmp(got.view.data, want.tensor.data, static_cast<size_t>(got.bytes())), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(got.view.data) % 64, 0u);
  }
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(Safetensors, WritesStridedViewsRowMajor) {
  const TempDir dir;
  const HostTensor wide = allocate_tensor(DType::f32, {4, 6});
  for (int64_t i = 0; i < 24; ++i) store_element(wide.view.data, DType::f32, i, double(i));
  Tensor transposed = wide.view;
  std::swap(transposed.shape[0], transposed.shape[1]);
  std::swap(transposed.stride[0], transposed.stride[1]);
  Tensor expanded = wide.view;
  expanded.stride[0] = 0;
  const std::string path = dir.file("t.safetensors");
  write_safetensors(path, {{"t", transposed}, {"e", expanded}});
  const SafetensorsFile file(path);
  const HostTensor t = file.read("t"), e = file.read("e");
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_EQ(at(t.view, i, j), at(wide.view, j, i));
      EXPECT_EQ(at(e.view, j, i), at(wide.view, 0, i));
    }
  EXPECT_EQ(tensor_sha256(t.view), tensor_sha256(transposed));
}

TEST(Safetensors, BytesAndFp8OfFiveDimensions) {
  const TempDir dir;
  for (const DType dtype : {DType::f8_e4m3, DType::u8}) {
    const HostTensor t = allocate_tensor(dtype, {2, 3, 1, 2, 4});
    for (int i = 0; i < 48; ++i)
      static_cast<uint8_t*>(t.view.data)[i] = static_cast<uint8_t>(5 * i);
    write_safetensors(dir.file("t.safetensors"), {{"t", t.view}});
    const HostTensor back = read_tensor(dir.file("t.safetensors"));
    EXPECT_EQ(back.view.dtype, dtype);
    EXPECT_EQ(shape_text(back.view), "[2, 3, 1, 2, 4]");
    EXPECT_EQ(std::memcmp(back.view.data, t.view.data, 48), 0);
  }
}

TEST(Safetensors, NanIsData) {
  const TempDir dir;
  const HostTensor t = allocate_tensor(DType::bf16, {2});
  static_cast<uint16_t*>(t.view.data)[0] = 0x7fc1;
  write_safetensors(dir.file("t.safetensors"), {{"t", t.view}});
  const HostTensor back = read_tensor(dir.file("t.safetensors"));
  EXPECT_EQ(static_cast<uint16_t*>(back.view.data)[0], 0x7fc1);
}

TEST(Safetensors, OtherTensorsMayHaveDtypesWeDoNotRead) {
  const std::string bytes = file_of("{\"a\":" + tensor("F8_E5M2", "[4]", "[0,4]") +
                                        ",\"n\":" + tensor("SOMETHING_NEW", "[8]", "[4,8]") +
                                        ",\"b\":" + tensor("F32", "[1]", "[8,12]") + "}   ",
                                    std::string(12, '\0'));
  parse(bytes, "b");
  expect_error(ErrorKind::invalid_data, {"x.safetensors", "'a'", "F8_E5M2"},
               [&] { parse(bytes, "a"); });
  expect_error(ErrorKind::invalid_data, {"x.safetensors", "'n'", "SOMETHING_NEW"},
               [&] { parse(bytes, "n"); });
  expect_error(ErrorKind::invalid_data, {"x.safetensors", "FILE:KEY"}, [&] { parse(bytes); });
  expect_error(ErrorKind::invalid_data, {"x.safetensors", "'c'", "'a'"},
               [&] { parse(bytes, "c"); });
}

TEST(Safetensors, HostileFilesNameFileAndField) {
  const std::string four(4, '\0');
  const std::string good = tensor("F32", "[1]", "[0,4]");
  const auto with = [&](const std::string& entry) {
    return file_of("{\"t\":" + entry + "}", four);
  };
  struct Case {
    const char* what;
    std::string bytes;
    const char* field;
  };
  const Case cases[] = {
      {"empty", "", "header length"},
      {"seven bytes", "1234567", "header length"},
      {"header beyond the file", std::string("\xff\0\0\0\0\0\0\0{}", 10), "header"},
      {"absurd header length", std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10),
       "header length"},
      {"signed header length", std::string("\0\0\0\0\0\0\0\x80{}", 10), "header length"},
      {"leading space", file_of(" {}", ""), "header"},
      {"array", file_of("[]", ""), "header"},
      {"not JSON", file_of("{\"t\"", four), "JSON"},
      {"bytes after", file_of("{\"t\":" + good + "} x", four), "JSON"},
      {"zero bytes after", file_of("{\"t\":" + good + "}" + std::string(2, '\0'), four), "JSON"},
      {"bad UTF-8", file_of("{\"\xff\":" + good + "}", four), "JSON"},
      {"name twice", file_of("{\"t\":" + good + ",\"t\":" + good + "}", four), "'t'"},
      {"field twice", with(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})"),
       "dtype"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{},"t":)" + good + "}", four),
       "__metadata__"},
      {"metadata no object", file_of(R"({"__metadata__":1,"t":)" + good + "}", four),
       "__metadata__"},
      {"metadata no string", file_of(R"({"__metadata__":{"a":1},"t":)" + good + "}", four),
       "__metadata__"},
      {"deep", file_of("{\"t\":" + std::string(1000, '[') + std::string(1000, ']') + "}", four),
       "nested"},
      {"no object", with("1"), "'t'"},
      {"no dtype", with(R"({"shape":[1],"data_offsets":[0,4]})"), "dtype"},
      {"no shape", with(R"({"dtype":"F32","data_offsets":[0,4]})"), "shape"},
      {"no offsets", with(R"({"dtype":"F32","shape":[1]})"), "data_offsets"},
      {"unknown field", with(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})"), "'x'"},
      {"dtype no string", with(R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})"), "dtype"},
      {"wrong dtype", with(tensor("U32", "[1]", "[0,4]")), "U32"},
      {"negative", with(tensor("F32", "[-1]", "[0,4]")), "shape"},
      {"float", with(tensor("F32", "[1.0]", "[0,4]")), "shape"},
      {"shape no array", with(tensor("F32", "1", "[0,4]")), "shape"},
      {"beyond 63 bits", with(tensor("F32", "[9223372036854775808]", "[0,4]")), "shape"},
      {"beyond 64 bits", with(tensor("F32", "[99999999999999999999999]", "[0,4]")), "shape"},
      {"overflow", with(tensor("F32", "[4294967296,4294967296]", "[0,4]")), "shape"},
      {"overflow behind a zero", with(tensor("F32", "[0,4294967296,4294967296]", "[0,4]")),
       "shape"},
      {"rank 6", with(tensor("F32", "[1,1,1,1,1,1]", "[0,4]")), "shape"},
      {"one offset", with(tensor("F32", "[1]", "[4]")), "data_offsets"},
      {"negative offset", with(tensor("F32", "[1]", "[-4,0]")), "data_offsets"},
      {"backwards", with(tensor("F32", "[1]", "[4,0]")), "data_offsets"},
      {"wrong size", with(tensor("F32", "[2]", "[0,4]")), "data_offsets"},
      {"beyond the file", with(tensor("F32", "[2]", "[0,8]")), "data_offsets"},
      {"huge beyond the file", with(tensor("F32", "[1000000000000]", "[0,4000000000000]")),
       "data_offsets"},
      {"does not begin at 0", with(tensor("F16", "[1]", "[2,4]")), "data_offsets"},
      {"trailing data", with(tensor("F16", "[1]", "[0,2]")), "data"},
      {"overlap", file_of("{\"a\":" + good + ",\"b\":" + good + "}", four), "data_offsets"},
      {"partial overlap",
       file_of("{\"a\":" + good + ",\"b\":" + tensor("F32", "[1]", "[2,6]") + "}", four + "12"),
       "data_offsets"},
      {"hole",
       file_of("{\"a\":" + good + ",\"b\":" + tensor("F32", "[1]", "[6,10]") + "}",
               four + "123456"),
       "hole"},
      {"no tensor", file_of("{}", ""), "0 tensors"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    expect_error(ErrorKind::invalid_data, {"x.safetensors", c.field}, [&] { parse(c.bytes); });
  }
}

// A message goes to a terminal, or to a program that reads it as UTF-8: also a half of a character,
// a control character of two bytes (U+009B) and a name cut short are plain ASCII in it.
TEST(Safetensors, MessagesAboutHostileNamesArePlainAscii) {
  std::string long_name;
  for (int i = 0; i < 150; ++i) long_name += "\u00e9";
  for (const std::string& name :
       {std::string("\xff\xfe"), std::string("\xc2\x9b[31m"), long_name}) {
    const std::string twice =
        "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}";
    try {
      SafetensorsFile(Source::memory("x.safetensors", file_of("{" + twice + "}", "12345678")));
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("x.safetensors"), std::string::npos) << text;
      for (const char c : text) EXPECT_TRUE(c >= ' ' && c <= '~') << text;
    }
  }
}

TEST(Safetensors, TensorsMayBeNamedInAnyOrder) {
  const std::string bytes = file_of(
      "{\"a\":" + tensor("F32", "[1]", "[4,8]") + ",\"b\":" + tensor("F32", "[1]", "[0,4]") + "}",
      std::string("\0\0\0\0\0\0\x80\x3f", 8));
  const SafetensorsFile file(Source::memory("x", bytes));
  EXPECT_EQ(at(file.read("a").view, 0), 1);
  EXPECT_EQ(at(file.read("b").view, 0), 0);
}

TEST(Safetensors, RefusesBadNamesOnWriting) {
  const TempDir dir;
  const HostTensor t = allocate_tensor(DType::f32, {1});
  const std::string path = dir.file("t.safetensors");
  for (const char* name : {"", "__metadata__"})
    expect_error(ErrorKind::usage, {"t.safetensors"}, [&] {
      write_safetensors(path, {{name, t.view}});
    });
  expect_error(ErrorKind::usage, {"'a'"}, [&] {
    write_safetensors(path, {{"a", t.view}, {"a", t.view}});
  });
  EXPECT_EQ(dir.entries(), 0u);
}

TEST(TensorArgument, Grammar) {
  const auto parsed = parse_tensor_argument("a/w.safetensors:model.layers.0:x");
  EXPECT_EQ(parsed.path, "a/w.safetensors");
  EXPECT_EQ(parsed.key, "model.layers.0:x");
  EXPECT_EQ(parse_tensor_argument("w.safetensors").key, "");
  EXPECT_FALSE(parse_tensor_argument("x.npy").safetensors);
  for (const char* wrong : {"x.npy:k", "w.safetensors:", "x.bin", ""})
    expect_error(ErrorKind::usage, {wrong}, [&] { parse_tensor_argument(wrong); });
}

}  // namespace
}  // namespace talea::io
