// What: the seven streams.
// Why: each one is a way in which training data has once exposed a wrong loss.
// Never: depends on the model beyond the size of its vocabulary.
#include "train/stream.hpp"

#include <algorithm>
#include <numeric>

#include "core/fail.hpp"
#include "train/random.hpp"

namespace talea::train {
namespace {

enum Purpose : uint64_t { order = 10, tokens, surprise, ignored, lengths, soft };

constexpr char line[] = "the tally stick is split and both halves must match\n";
constexpr int64_t line_length = sizeof line - 1;

}  // namespace

std::vector<std::string> stream_names() {
  return {"text", "random", "repeat", "ignored", "varlen", "empty-micro", "soft"};
}

Stream::Stream(const TrainConfig& config, const Corpus& corpus) : config_(config), corpus_(corpus) {
  const DataConfig& d = config.data;
  const auto names = stream_names();
  require(std::find(names.begin(), names.end(), d.stream) != names.end(), ErrorKind::usage,
          "stream = {}: no such stream (text, random, repeat, ignored, varlen, empty-micro, soft)",
          d.stream);
  require(d.seq_len > 0 && d.batch > 0 && config.grad_accum > 0 && d.epochs > 0, ErrorKind::usage,
          "seq-len {}, batch {}, grad-accum {} and epochs {} must be positive", d.seq_len, d.batch,
          config.grad_accum, d.epochs);
  require(d.total_tokens >= 0 && config.max_steps >= 0, ErrorKind::usage,
          "total-tokens {} and max-steps {} must not be negative", d.total_tokens,
          config.max_steps);
  require(config.model.vocab >= 256 || d.stream == "random", ErrorKind::usage,
          "vocab = {}: byte-level text needs 256", config.model.vocab);
  const bool from_text = d.stream != "random" && d.stream != "repeat";
  const auto bytes = static_cast<int64_t>(corpus.bytes.size());
  require(!from_text || bytes > 0 || !d.text_files.empty(), ErrorKind::usage,
          "stream {}: needs text files (--text)", d.stream);
  require(!from_text || bytes > d.seq_len, ErrorKind::invalid_data,
          "text: {} bytes, at least seq-len + 1 = {} are needed", bytes, d.seq_len + 1);
  windows_ = from_text ? (bytes - 1) / d.seq_len : 0;
  const int64_t all = from_text ? windows_ * d.seq_len : int64_t{1} << 17;
  const int64_t drawn = d.total_tokens > 0 ? d.total_tokens : all;
  micros_per_epoch_ = std::max<int64_t>(1, drawn / (d.seq_len * d.batch));
}

int64_t Stream::window(int64_t cursor) const {
  return std::min(config_.grad_accum, micros_per_epoch_ - cursor % micros_per_epoch_);
}

int64_t Stream::windows_per_epoch() const {
  return (micros_per_epoch_ + config_.grad_accum - 1) / config_.grad_accum;
}

void Stream::shuffle(int64_t epoch) {
  if (shuffled_epoch_ == epoch) return;
  order_.resize(static_cast<size_t>(windows_));
  std::iota(order_.begin(), order_.end(), int64_t{0});
  const Random random(config_.seed, Purpose::order + 100 * static_cast<uint64_t>(epoch));
  for (int64_t i = windows_ - 1; i > 0; --i)
    std::swap(order_[i], order_[random.below(static_cast<uint64_t>(i), i + 1)]);
  shuffled_epoch_ = epoch;
}

void Stream::fill_text(Batch& b, int64_t cursor) {
  shuffle(cursor / micros_per_epoch_);
  const int64_t first = cursor % micros_per_epoch_ * b.sequences;
  for (int64_t q = 0; q < b.sequences; ++q) {
    const uint8_t* text = corpus_.bytes.data() + order_[(first + q) % windows_] * b.seq_len;
    for (int64_t t = 0; t < b.seq_len; ++t) {
      b.inputs[q * b.seq_len + t] = text[t];
      b.targets[q * b.seq_len + t] = text[t + 1];
    }
  }
}

void Stream::fill_random(Batch& b, int64_t cursor) const {
  const Random random(config_.seed, Purpose::tokens);
  for (int64_t q = 0; q < b.sequences; ++q) {
    const auto base = static_cast<uint64_t>((cursor * b.sequences + q) * (b.seq_len + 1));
    for (int64_t t = 0; t < b.seq_len; ++t) {
      const auto at = base + static_cast<uint64_t>(t);
      b.inputs[q * b.seq_len + t] = static_cast<int32_t>(random.below(at, config_.model.vocab));
      b.targets[q * b.seq_len + t] = random.below(at + 1, config_.model.vocab);
    }
  }
}

void Stream::fill_repeat(Batch& b, int64_t cursor) const {
  const Random random(config_.seed, Purpose::surprise);
  for (int64_t q = 0; q < b.sequences; ++q) {
    const int64_t start = (cursor * b.sequences + q) * b.seq_len;
    for (int64_t t = 0; t < b.seq_len; ++t) {
      const auto at = static_cast<uint64_t>(start + t);
      b.inputs[q * b.seq_len + t] = static_cast<uint8_t>(line[(start + t) % line_length]);
      int64_t target = static_cast<uint8_t>(line[(start + t + 1) % line_length]);
      // A confident model meets an unlikely target: where a clamp caps the loss.
      if (random.uniform(at) < 1.0 / 512) target = random.below(at ^ 0x5eed, 256);
      b.targets[q * b.seq_len + t] = target;
    }
  }
}

void Stream::alter(Batch& b, int64_t cursor) const {
  const std::string& name = config_.data.stream;
  const Random skip(config_.seed, Purpose::ignored), length(config_.seed, Purpose::lengths);
  for (int64_t i = 0; i < b.tokens(); ++i) {
    const auto at = static_cast<uint64_t>(cursor * b.tokens() + i);
    if (name == "ignored" && skip.uniform(at) < 0.2) b.targets[i] = ignore_index;
    if (name != "varlen") continue;
    const auto row = static_cast<uint64_t>(cursor * b.sequences + i / b.seq_len);
    if (i % b.seq_len >= 1 + length.below(row, b.seq_len)) {
      b.inputs[i] = 0;  // padding; causal, so no valid token sees it
      b.targets[i] = ignore_index;
    }
  }
  // The third micro-step of every window (the only one of a window of one never).
  if (name == "empty-micro" && cursor % micros_per_epoch_ % config_.grad_accum == 2)
    std::fill(b.targets.begin(), b.targets.end(), ignore_index);
}

void Stream::soften(Batch& b, int64_t cursor) const {
  const Random random(config_.seed, Purpose::soft);
  b.soft_k = 3;
  for (int64_t i = 0; i < b.tokens(); ++i) {
    const auto at = static_cast<uint64_t>(cursor * b.tokens() + i);
    const int64_t other = random.below(2 * at, 256), third = random.below(2 * at + 1, 256);
    b.soft_ids.insert(b.soft_ids.end(), {b.targets[i], other, third});
    b.soft_probs.insert(b.soft_probs.end(), {0.875f, 0.0625f, 0.0625f});
  }
  b.targets.clear();
}

Batch Stream::micro(int64_t cursor) {
  Batch b;
  b.sequences = config_.data.batch;
  b.seq_len = config_.data.seq_len;
  b.inputs.resize(static_cast<size_t>(b.tokens()));
  b.targets.resize(static_cast<size_t>(b.tokens()));
  if (config_.data.stream == "random")
    fill_random(b, cursor);
  else if (config_.data.stream == "repeat")
    fill_repeat(b, cursor);
  else
    fill_text(b, cursor);
  alter(b, cursor);
  if (config_.data.stream == "soft") soften(b, cursor);
  return b;
}

}  // namespace talea::train
