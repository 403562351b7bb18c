// What: the micro-steps of a run as a pure function of (seed, corpus, cursor).
// Why: every twin sees the same data, and resuming needs one number.
// Never: keeps a generator's state.
#pragma once

#include <memory>

#include "train/batch.hpp"
#include "train/config.hpp"
#include "train/corpus.hpp"

namespace talea::train {

// text: shuffled windows of the corpus. random: uniform tokens. repeat: one line again and again,
// with a rare surprise. ignored: text, 20 % of the targets ignored. varlen: text of uneven lengths,
// padding ignored. empty-micro: text, one micro-step of a window has every target ignored.
// soft: text with sparse soft targets.
std::vector<std::string> stream_names();

class Stream {
 public:
  Stream(const TrainConfig& config, const Corpus& corpus);

  int64_t micros_per_epoch() const { return micros_per_epoch_; }
  // Micro-steps of the window that starts at `cursor`: grad_accum, or what is left of the epoch.
  int64_t window(int64_t cursor) const;
  int64_t windows_per_epoch() const;
  Batch micro(int64_t cursor);

 private:
  void shuffle(int64_t epoch);
  void fill_text(Batch& batch, int64_t cursor);
  void fill_random(Batch& batch, int64_t cursor) const;
  void fill_repeat(Batch& batch, int64_t cursor) const;
  void alter(Batch& batch, int64_t cursor) const;
  void soften(Batch& batch, int64_t cursor) const;

  TrainConfig config_;
  const Corpus& corpus_;
  int64_t windows_ = 0, micros_per_epoch_ = 0, shuffled_epoch_ = -1;
  std::vector<int64_t> order_;
};

}  // namespace talea::train
