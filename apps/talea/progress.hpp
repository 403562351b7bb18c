// What: a progress bar with rate and time left, on stderr.
// Why: anything longer than a second says how far it is; shared by every subcommand.
// Never: writes to stdout, or to a stderr that is no terminal unless asked to.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "context.hpp"
#include "core/fail.hpp"

namespace talea::cli {

class Progress {
 public:
  Progress(const Context& context, std::string label, int64_t total, std::string unit)
      : label_(std::move(label)), unit_(std::move(unit)), total_(total) {
    const bool terminal = ::isatty(STDERR_FILENO);
    mode_ = context.quiet ? "none" : context.progress;
    if (mode_ == "auto") mode_ = terminal ? "bar" : "none";
    colour_ = terminal && !std::getenv("NO_COLOR");
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` stands behind the bar, e.g. "loss 2.345".
  void advance(int64_t by = 1, const std::string& note = "") {
    done_ += by;
    const auto now = Clock::now();
    const bool last = done_ >= total_;
    const double pause = mode_ == "plain" ? 5.0 : 0.1;
    if (mode_ == "none" || seconds(now - start_) < 1 || (!last && seconds(now - shown_) < pause))
      return;
    shown_ = now;
    show(seconds(now - start_), note);
  }

  // Wipes the bar, so that a line can be printed in its place.
  void clear() {
    if (drawn_) std::fputs("\r\033[K", stderr);
    drawn_ = false;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

  static std::string clock(double s) {
    const auto whole = static_cast<int64_t>(s + 0.5);
    return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                         : fmt::format("{}:{:02}", whole / 60, whole % 60);
  }

  void show(double elapsed, const std::string& note) {
    const double share = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1;
    const double rate = static_cast<double>(done_) / elapsed;
    const double left = rate > 0 ? static_cast<double>(total_ - done_) / rate : 0;
    if (mode_ == "json") {
      fmt::print(stderr,
                 "{{\"progress\": \"{}\", \"done\": {}, \"total\": {}, \"rate_per_s\": {:.4g}, "
                 "\"left_s\": {:.1f}}}\n",
                 label_, done_, total_, rate, left);
      return;
    }
    const std::string figures =
        fmt::format("{}/{} {}  {:.3g}/s  {} left", done_, total_, unit_, rate, clock(left));
    if (mode_ == "plain") {
      fmt::print(stderr, "{}  {:3.0f}%  {}  {}\n", label_, 100 * share, figures, note);
      return;
    }
    constexpr int width = 24;
    const int full = static_cast<int>(share * width);
    std::string bar;
    for (int i = 0; i < width; ++i) bar += i < full ? "\u2588" : "\u2591";
    fmt::print(stderr, "\r\033[K{}  {}{}{}  {:3.0f}%  {}  {}", label_, colour_ ? "\033[36m" : "",
               bar, colour_ ? "\033[0m" : "", 100 * share, figures, note);
    std::fflush(stderr);
    drawn_ = true;
  }

  std::string label_, unit_, mode_;
  int64_t total_, done_ = 0;
  bool colour_ = false, drawn_ = false;
  Clock::time_point start_ = Clock::now(), shown_{};
};

}  // namespace talea::cli
