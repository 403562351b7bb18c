// What: .npy round trips and a table of hostile files.
// Why: each malformed header must end in an error that names file and field, never in memory.
// Never: needs NumPy; the bytes are written out here.
#include "io/npy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.hpp"
#include "support/expect_error.hpp"
#include "support/temp_dir.hpp"

namespace talea::io {
namespace {

using testing::expect_error;
using testing::TempDir;

std::string npy(const std::string& dict, const std::string& data, char major = 1) {
  std::string bytes = "\x93NUMPY";
  bytes +=
      {major, '\0', static_cast<char>(dict.size() & 0xff), static_cast<char>(dict.size() >> 8)};
  if (major > 1) bytes += {'\0', '\0'};
  return bytes + dict + data;
}

std::string dict(const std::string& descr, const std::string& shape, bool fortran = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") +
         ", 'shape': " + shape + ", }\n";
}

HostTensor parse(const std::string& bytes) { return read_npy(Source::memory("x.npy", bytes)); }

std::string floats(std::initializer_list<float> values) {
  return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(float)};
}

TEST(Npy, RoundTripsEveryDtypeAndRank) {
  const TempDir dir;
  for (const DType dtype :
       {DType::f32, DType::f64, DType::f16, DType::i32, DType::i64, DType::u8}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
             {}, {0}, {5}, {2, 3}, {0, 7}, {2, 3, 4}, {2, 1, 3, 2}, {1, 2, 3, 1, 2}}) {
      HostTensor tensor = allocate_tensor(dtype, shape);
      for (int64_t i = 0; i < tensor.view.elements(); ++i)
        store_element(tensor.view.data, dtype, i,
                      static_cast<double>(i) - (dtype == DType::u8 ? 0 : 3));
      const std::string path = dir.file("t.npy");
      write_npy(path, tensor.view);
      const HostTensor back = read_npy(path);
      EXPECT_EQ(shape_text(back.view), shape_text(shape));
      EXPECT_EQ(back.view.dtype, dtype);
      EXPECT_EQ(std::memcmp(back.view.data, tensor.view.data, static_cast<size_t>(back.bytes())),
                0);
      const std::string text = testing::slurp(path);
      EXPECT_EQ((text.size() - static_cast<size_t>(back.bytes())) % 64, 0u);
    }
  }
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(Npy, KeepsNanAndInfinity) {
  const HostTensor t = parse(npy(dict("<f4", "(2,)"), floats({std::nanf(""), INFINITY})));
  EXPECT_TRUE(std::isnan(at(t.view, 0)));
  EXPECT_TRUE(std::isinf(at(t.view, 1)));
}

TEST(Npy, ReadsVersions2And3AndOtherSpacing) {
  for (const char major : {'\2', '\3'})
    EXPECT_EQ(at(parse(npy(dict("<f4", "(1,)"), floats({4}), major)).view, 0), 4);
  EXPECT_EQ(
      at(parse(npy("{\"shape\":(1,),\"descr\":\"<f4\",\"fortran_order\":False}", floats({4}))).view,
         0),
      4);
}

TEST(Npy, FortranOrderIsAView) {
  const HostTensor t = parse(npy(dict("<f4", "(2, 3)", true), floats({1, 2, 3, 4, 5, 6})));
  EXPECT_EQ(t.view.stride[0], 1);
  EXPECT_EQ(t.view.stride[1], 2);
  EXPECT_EQ(at(t.view, 0, 1), 3);
  EXPECT_EQ(at(t.view, 1, 2), 6);
  // Written again it is row-major, with the same elements.
  const TempDir dir;
  write_npy(dir.file("c.npy"), t.view);
  const HostTensor c = read_npy(dir.file("c.npy"));
  EXPECT_EQ(c.view.stride[0], 3);
  EXPECT_EQ(at(c.view, 1, 2), 6);
  EXPECT_EQ(at(c.view, 0, 1), 3);
}

TEST(Npy, HostileFilesNameFileAndField) {
  const std::string one = floats({1});
  struct Case {
    const char* what;
    std::string bytes;
    const char* field;
  };
  const Case cases[] = {
      {"empty", "", "magic"},
      {"short magic", "\x93NUM", "magic"},
      {"other magic", std::string("\x93NUMPX\1\0\2\0{}", 12), "magic"},
      {"version 0", npy(dict("<f4", "(1,)"), one, 0), "version"},
      {"version 4", npy(dict("<f4", "(1,)"), one, 4), "version"},
      {"header beyond the file", std::string("\x93NUMPY\1\0\xff\xff{}", 12), "header"},
      {"4 GiB header", std::string("\x93NUMPY\2\0\xff\xff\xff\xff{}", 14), "header length"},
      {"no dictionary", npy("hello", one), "header"},
      {"no end", npy("{'descr': '<f4'", one), "header"},
      {"string without end", npy("{'descr': '<f4", one), "descr"},
      {"no descr", npy("{'fortran_order': False, 'shape': (1,)}", one), "descr"},
      {"no order", npy("{'descr': '<f4', 'shape': (1,)}", one), "fortran_order"},
      {"no shape", npy("{'descr': '<f4', 'fortran_order': False}", one), "shape"},
      {"key twice",
       npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", one),
       "descr"},
      {"unknown key", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", one),
       "'x'"},
      {"code", npy("{'descr': __import__('os'), 'fortran_order': False, 'shape': (1,)}", one),
       "descr"},
      {"structured", npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", one),
       "descr"},
      {"bad bool", npy("{'descr': '<f4', 'fortran_order': 1, 'shape': (1,)}", one),
       "fortran_order"},
      {"bytes after", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", one),
       "header"},
      {"big endian", npy(dict(">f4", "(1,)"), one), ">f4"},
      {"object", npy(dict("|O", "(1,)"), one), "|O"},
      {"int8", npy(dict("|i1", "(4,)"), one), "|i1"},
      {"complex", npy(dict("<c8", "(1,)"), one), "<c8"},
      {"control bytes in dtype", npy(dict("\x1b[31m", "(1,)"), one), "?[31m"},
      {"negative", npy(dict("<f4", "(-1,)"), one), "shape"},
      {"beyond 64 bits", npy(dict("<f4", "(99999999999999999999,)"), one), "shape"},
      {"product overflow", npy(dict("<f4", "(4294967296, 4294967296)"), one), "shape"},
      {"overflow to one element", npy(dict("<f4", "(4294967296, 4294967296, 1)"), one), "shape"},
      {"overflow behind a zero", npy(dict("<f4", "(0, 4294967296, 4294967296)"), ""), "shape"},
      {"rank 6", npy(dict("<f4", "(1, 1, 1, 1, 1, 1)"), one), "shape"},
      {"not a tuple", npy(dict("<f4", "1"), one), "shape"},
      {"not a number", npy(dict("<f4", "(a,)"), one), "shape"},
      {"float extent", npy(dict("<f4", "(1.5,)"), one), "shape"},
      {"truncated", npy(dict("<f4", "(2,)"), one), "data"},
      {"huge and truncated", npy(dict("<f4", "(1000000000000,)"), one), "data"},
      {"trailing", npy(dict("<f4", "(1,)"), one + "x"), "data"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    expect_error(ErrorKind::invalid_data, {"x.npy", c.field}, [&] { parse(c.bytes); });
  }
}

TEST(Npy, EveryTruncationAndEverySingleByteChangeIsHandled) {
  const std::string good = npy(dict("<f4", "(2, 1)"), floats({1, 2}));
  for (size_t n = 0; n < good.size(); ++n)
    expect_error(ErrorKind::invalid_data, {"x.npy"}, [&] { parse(good.substr(0, n)); });
  for (size_t n = 0; n < good.size(); ++n)
    for (const int change : {1, 2, 4, 8, 16, 32, 64, 128}) {
      std::string bad = good;
      bad[n] = static_cast<char>(bad[n] ^ change);
      try {
        parse(bad);  // data bytes and white space may differ
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_data);
      }
    }
}

TEST(Npy, RefusesToWriteBf16) {
  const TempDir dir;
  const HostTensor t = allocate_tensor(DType::bf16, {2});
  expect_error(ErrorKind::usage, {"bf16", "safetensors"},
               [&] { write_npy(dir.file("t.npy"), t.view); });
  EXPECT_EQ(dir.entries(), 0u);
}

}  // namespace
}  // namespace talea::io
