// What: a call prepared once and made again with other addresses, through the C door.
// Why: what it leaves out must be what no address changes: same numbers, same errors.
// Never: includes a header of the C++ interface.
#include <gtest/gtest.h>
#include <talea/talea.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "view.hpp"

namespace {

// Three tokens, hidden 8, five words; each set of tensors has an address of its own.
struct Tensors {
  alignas(64) float x[24], w[40], loss[16], dx[32], dw[40];
  alignas(64) int64_t y[3];
  explicit Tensors(float shift) {
    for (int i = 0; i < 24; ++i) x[i] = static_cast<float>(i % 7) * 0.25f + shift;
    for (int i = 0; i < 40; ++i) w[i] = static_cast<float>(i % 5) * 0.5f - shift;
    for (int i = 0; i < 3; ++i) y[i] = (i + 2) % 5;
    std::memset(loss, 0xff, sizeof loss);
    std::memset(dx, 0xff, sizeof dx);
    std::memset(dw, 0xff, sizeof dw);
  }
};

class Again : public ::testing::Test {
 protected:
  void SetUp() override {
    inputs.struct_bytes = sizeof inputs;
    outputs.struct_bytes = sizeof outputs;
    ASSERT_EQ(talea_linear_cross_entropy_options_init(&options, sizeof options), TALEA_OK);
    describe(nullptr);
    args = args_of(inputs, outputs, options);
    ASSERT_EQ(talea_linear_cross_entropy_workspace_bytes(&args, &args.workspace_bytes), TALEA_OK)
        << talea_last_error();
    ASSERT_EQ(talea_linear_cross_entropy_prepare(&args, &prepared), TALEA_OK) << talea_last_error();
  }
  void TearDown() override { talea_linear_cross_entropy_prepared_free(prepared); }

  void describe(Tensors* t) {
    inputs.hidden = view(t ? t->x : nullptr, TALEA_F32, {3, 8});
    inputs.weight = view(t ? t->w : nullptr, TALEA_F32, {5, 8});
    inputs.targets = view(t ? t->y : nullptr, TALEA_I64, {3});
    outputs.loss = view(t ? t->loss : nullptr, TALEA_F32, {});
    outputs.dx = view(t ? t->dx : nullptr, TALEA_F32, {3, 8});
    outputs.dw = view(t ? t->dw : nullptr, TALEA_F32, {5, 8});
  }

  talea_linear_cross_entropy_places places_of(Tensors& t) {
    workspace.assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
    talea_linear_cross_entropy_places p{};
    p.struct_bytes = sizeof p;
    p.workspace = workspace.data();
    p.count = 6;
    void* const at[] = {t.x, t.w, t.y, t.loss, t.dx, t.dw};
    std::copy(std::begin(at), std::end(at), p.data);
    return p;
  }

  void expect_error(const talea_linear_cross_entropy_places& p, talea_status kind,
                    const char* text) {
    EXPECT_EQ(talea_linear_cross_entropy_again(prepared, &p), kind);
    EXPECT_NE(std::string(talea_last_error()).find(text), std::string::npos) << talea_last_error();
  }

  talea_linear_cross_entropy_inputs inputs{};
  talea_linear_cross_entropy_outputs outputs{};
  talea_linear_cross_entropy_options options{};
  talea_linear_cross_entropy_args args{};
  talea_linear_cross_entropy_prepared* prepared = nullptr;
  std::vector<char> workspace;
};

TEST_F(Again, GivesTheBitsOfAPlainCall) {
  for (const float shift : {0.f, 0.5f, -1.f}) {
    Tensors plain(shift), again(shift);
    describe(&plain);
    std::vector<char> room;
    ASSERT_EQ(call_in(room, args), TALEA_OK) << talea_last_error();
    const auto places = places_of(again);
    ASSERT_EQ(talea_linear_cross_entropy_again(prepared, &places), TALEA_OK) << talea_last_error();
    EXPECT_EQ(std::memcmp(plain.loss, again.loss, sizeof plain.loss), 0);
    EXPECT_EQ(std::memcmp(plain.dx, again.dx, sizeof plain.dx), 0);
    EXPECT_EQ(std::memcmp(plain.dw, again.dw, sizeof plain.dw), 0);
  }
}

TEST_F(Again, TakesAddressesOfAnyAlignment) {
  Tensors plain(0.25f), again(0.25f);
  describe(&plain);
  std::vector<char> room;
  ASSERT_EQ(call_in(room, args), TALEA_OK);
  auto places = places_of(again);
  places.data[4] = again.dx + 1;
  ASSERT_EQ(talea_linear_cross_entropy_again(prepared, &places), TALEA_OK) << talea_last_error();
  EXPECT_EQ(std::memcmp(plain.dx, again.dx + 1, 24 * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(plain.dw, again.dw, sizeof plain.dw), 0);
}

TEST_F(Again, SaysWhatAPlainCallSays) {
  Tensors t(0);
  auto places = places_of(t);
  places.data[5] = t.w;
  expect_error(places, TALEA_INVALID_DATA, "dw: its memory overlaps the input weight");
  places = places_of(t);
  places.data[4] = t.dw + 8;
  expect_error(places, TALEA_INVALID_DATA, "dx: its memory overlaps the output dw");
  places = places_of(t);
  places.workspace = t.dw;
  expect_error(places, TALEA_INVALID_DATA, "workspace: its memory overlaps");
  places.workspace = nullptr;
  expect_error(places, TALEA_USAGE, "workspace: 0 bytes given");
  places = places_of(t);
  places.data[1] = nullptr;
  expect_error(places, TALEA_INVALID_DATA, "weight: null pointer");
  places = places_of(t);
  places.data[5] = reinterpret_cast<char*>(t.dw) + 1;
  expect_error(places, TALEA_INVALID_DATA, "dw: its address is no multiple of the 4 bytes");
  t.y[2] = 5;
  expect_error(places_of(t), TALEA_INVALID_DATA, "targets[2] = 5");
}

TEST_F(Again, WrongPlacesAreRefused) {
  Tensors t(0);
  auto places = places_of(t);
  places.count = 5;
  expect_error(places, TALEA_USAGE, "places: 5 addresses for 6 tensors");
  places.count = 6;
  places.struct_bytes -= 8;
  expect_error(places, TALEA_USAGE, "places: struct_bytes");
  EXPECT_EQ(talea_linear_cross_entropy_again(nullptr, &places), TALEA_USAGE);
  EXPECT_EQ(talea_linear_cross_entropy_again(prepared, nullptr), TALEA_USAGE);
}

TEST_F(Again, WhatCannotBePreparedSaysSo) {
  talea_linear_cross_entropy_prepared* none = prepared;
  --args.workspace_bytes;
  EXPECT_EQ(talea_linear_cross_entropy_prepare(&args, &none), TALEA_USAGE);
  EXPECT_EQ(none, nullptr);
  EXPECT_NE(std::string(talea_last_error()).find("bytes needed by lane"), std::string::npos);
  ++args.workspace_bytes;
  talea_linear_cross_entropy_ranks ranks{};
  ranks.struct_bytes = sizeof ranks;
  args.ranks = &ranks;
  EXPECT_EQ(talea_linear_cross_entropy_prepare(&args, &none), TALEA_USAGE);
  args.ranks = nullptr;
  options.label_smoothing = 2;
  EXPECT_EQ(talea_linear_cross_entropy_prepare(&args, &none), TALEA_USAGE);
  EXPECT_NE(std::string(talea_last_error()).find("label_smoothing = 2"), std::string::npos);
  EXPECT_EQ(talea_linear_cross_entropy_prepare(&args, nullptr), TALEA_USAGE);
  talea_linear_cross_entropy_prepared_free(nullptr);
}

TEST_F(Again, TheLogSpeaksOfIt) {
  std::vector<std::string> lines;
  talea_set_log_callback(
      [](int32_t, const char* text, void* user) {
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
      },
      &lines);
  Tensors t(0);
  const auto places = places_of(t);
  EXPECT_EQ(talea_linear_cross_entropy_again(prepared, &places), TALEA_OK);
  talea_set_log_callback(nullptr, nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("linear_cross_entropy: lane "), std::string::npos);
}

// The data of `places` has room for every tensor.
TEST(AgainConstants, Layout) {
  EXPECT_EQ(sizeof(talea_linear_cross_entropy_places), 32u + 28 * sizeof(void*));
}

}  // namespace
