// What: one process of a world of NCCL ranks, and communicators that change how its sums are made.
// Why: speed and training runs join in the same way; a variant is a wrapper, not another build.
// Never: used outside bench/nccl.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/device_session.hpp"
#include "talea/ranks.hpp"

namespace talea::bench {

// How the ranks of a run meet: processes of one host, a GPU each.
struct World {
  int rank = 0, size = 1;
  std::string library;
  std::unique_ptr<Communicator> host;

  // By how many multiprocessors the sums are limited; see NcclOptions.
  std::unique_ptr<Communicator> join(int multiprocessors_beside) const {
    std::string own = rank == 0 ? nccl_unique_id(library) : std::string(128, '\0');
    std::string all(own.size() * static_cast<size_t>(size), '\0');
    host->all_gather(own.data(), all.data(), static_cast<int64_t>(own.size()), nullptr);
    NcclOptions o;
    o.rank = rank;
    o.size = size;
    o.timeout_s = 30;
    o.unique_id = all.substr(0, own.size());
    o.host = host.get();
    o.library = library;
    o.multiprocessors_beside = multiprocessors_beside;
    return make_nccl_communicator(o);
  }
  std::vector<double> of_all(double own) const {
    std::vector<double> all(static_cast<size_t>(size));
    host->all_gather(&own, all.data(), sizeof own, nullptr);
    return all;
  }
  double largest(double own) const {
    const std::vector<double> all = of_all(own);
    return *std::max_element(all.begin(), all.end());
  }
  void meet() const { largest(0); }
};

// Hands everything on; what the variants below change.
class Through : public Communicator {
 public:
  explicit Through(Communicator& c) : c_(c) {}
  const char* engine() const override { return c_.engine(); }
  int rank() const override { return c_.rank(); }
  int size() const override { return c_.size(); }
  DeviceKind device() const override { return c_.device(); }
  int multiprocessors_beside() const override { return c_.multiprocessors_beside(); }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream s) override {
    c_.all_gather(send, recv, bytes, s);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    c_.all_reduce_sum(buffer, count, dtype, s);
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream s) override {
    c_.reduce_scatter_sum(send, recv, count, dtype, s);
  }
  void begin_all_gather(const void* send, void* recv, int64_t bytes, Stream s) override {
    c_.begin_all_gather(send, recv, bytes, s);
  }
  void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    c_.begin_all_reduce_sum(buffer, count, dtype, s);
  }
  void begin_reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                                Stream s) override {
    c_.begin_reduce_scatter_sum(send, recv, count, dtype, s);
  }
  void join(Stream s) override { c_.join(s); }
  Stream stream_beside() override { return c_.stream_beside(); }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    return c_.host_gather(send, recv, bytes);
  }
  void wait(Stream s) override { c_.wait(s); }

 protected:
  Communicator& c_;
};

// Once silent, exchanges nothing: the products of R ranks without what passes between them. Such
// calls work on what an earlier one left in the buffers; their results are nonsense.
class Silent final : public Through {
 public:
  using Through::Through;
  bool silent = false;
  void all_gather(const void* send, void* recv, int64_t bytes, Stream s) override {
    if (!silent) c_.all_gather(send, recv, bytes, s);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    if (!silent) c_.all_reduce_sum(buffer, count, dtype, s);
  }
  // A sum of nothing still orders the streams: what follows it keeps its place.
  void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    c_.begin_all_reduce_sum(buffer, silent ? 0 : count, dtype, s);
  }
};

// Marks the stream around every exchange: where the time of a call goes.
class Marked final : public Through {
 public:
  Marked(Communicator& c, DeviceSession& d) : Through(c), d_(d) {}
  struct Part {
    std::string name;
    int mark;  // at its end
  };
  std::vector<Part> parts;
  void start() { parts = {{"start", d_.mark()}}; }
  void end(const std::string& name) { parts.push_back({name, d_.mark()}); }

  void all_gather(const void* send, void* recv, int64_t bytes, Stream s) override {
    end("work before all_gather");
    Through::all_gather(send, recv, bytes, s);
    end("all_gather");
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    end("work before the sum of dX");
    Through::all_reduce_sum(buffer, count, dtype, s);
    end("sum of dX");
  }
  void begin_all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    end("work before the sum of dX");
    Through::begin_all_reduce_sum(buffer, count, dtype, s);
  }
  void join(Stream s) override {
    end("work beside the sum of dX");
    Through::join(s);
    end("wait for the sum of dX");
  }

 private:
  DeviceSession& d_;
};

// Sums at once on the caller's stream, also where the communicator could sum beside a product.
class AtOnce final : public Through {
 public:
  using Through::Through;
  int multiprocessors_beside() const override { return 0; }
};

struct Size {
  int64_t tokens, hidden, vocab;
  std::string lane;
  int64_t limit_bytes;
};

}  // namespace talea::bench
