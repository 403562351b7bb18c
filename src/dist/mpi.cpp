// What: blocks between processes over MPI, point to point, with a deadline on every exchange.
// Why: a blocking collective hangs for ever on a rank that died; here the missing rank is named.
// Never: blocks inside MPI; never throws (it is a plug-in behind a C interface).
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/mpi_plugin.h"

struct talea_mpi_world {
  MPI_Comm data = MPI_COMM_NULL;    // blocks
  MPI_Comm faults = MPI_COMM_NULL;  // "rank r is missing", said by whoever noticed first
  int rank = 0, size = 1;
  double timeout_s = 0;
  bool failed = false, started_here = false;
  int32_t missing = -1;  // what the fault messages of this rank carry
  std::vector<MPI_Request> requests;
};

namespace {

using Clock = std::chrono::steady_clock;

struct Error {
  char* text;
  int64_t bytes;
  int32_t operator()(const std::string& message) const {
    std::snprintf(text, static_cast<size_t>(bytes), "%s", message.c_str());
    return 1;
  }
};

std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", s);
  return text;
}

// MPI_Init waits for every process of the job: it runs aside, so that waiting for it can end.
struct Start {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

bool initialise(double timeout_s) {
  auto start = std::make_shared<Start>();
  std::thread([start] {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    const std::lock_guard lock(start->mutex);
    start->done = true;
    start->changed.notify_all();
  }).detach();
  std::unique_lock lock(start->mutex);
  return start->changed.wait_for(lock, std::chrono::duration<double>(std::min(timeout_s, 1e9)),
                                 [&] { return start->done; });
}

int32_t open(double timeout_s, talea_mpi_world** out, int32_t* rank, int32_t* size, char* error,
             int64_t error_bytes) {
  const Error says{error, error_bytes};
  auto world = std::make_unique<talea_mpi_world>();
  int there = 0, over = 0;
  MPI_Initialized(&there);
  MPI_Finalized(&over);
  if (over) return says("mpi: MPI has already been finalised in this process");
  if (!there) {
    if (!initialise(timeout_s))
      return says("mpi: not every rank reached MPI_Init within " + seconds(timeout_s));
    world->started_here = true;
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (MPI_Comm_dup(MPI_COMM_WORLD, &world->data) != MPI_SUCCESS ||
      MPI_Comm_dup(MPI_COMM_WORLD, &world->faults) != MPI_SUCCESS)
    return says("mpi: MPI_Comm_dup failed");
  MPI_Comm_set_errhandler(world->data, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(world->faults, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world->data, &world->rank);
  MPI_Comm_size(world->data, &world->size);
  world->timeout_s = timeout_s;
  *rank = world->rank;
  *size = world->size;
  *out = world.release();
  return 0;
}

// Tells the others who is missing, so that all name the same rank, also those a step ahead.
void tell(talea_mpi_world& w, int missing) {
  w.failed = true;
  w.missing = missing;
  for (int r = 0; r < w.size; ++r) {
    MPI_Request request;
    if (r != w.rank && r != missing)
      MPI_Isend(&w.missing, 1, MPI_INT32_T, r, 0, w.faults, &request);
  }
  int flag = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, 1, w.faults, &flag, MPI_STATUS_IGNORE);  // moves the messages on
}

int heard_of(talea_mpi_world& w) {
  int flag = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, 0, w.faults, &flag, &status);
  if (!flag) return -1;
  int32_t missing = -1;
  MPI_Recv(&missing, 1, MPI_INT32_T, status.MPI_SOURCE, 0, w.faults, MPI_STATUS_IGNORE);
  return missing;
}

std::string missing_text(int rank, const char* what, const talea_mpi_world& w) {
  return "rank " + std::to_string(rank) + ": did not arrive at " + what + " of the world of " +
         std::to_string(w.size) + " MPI processes within " + seconds(w.timeout_s);
}

// Requests: receives first, by rank, then sends; index of the first receive that is not complete.
int first_open(const talea_mpi_world& w) {
  const size_t others = w.requests.size() / 2;
  for (size_t i = 0; i < w.requests.size(); ++i)
    if (w.requests[i] != MPI_REQUEST_NULL) {
      const int r = static_cast<int>(i % others);
      return r < w.rank ? r : r + 1;
    }
  return -1;
}

int32_t wait(talea_mpi_world& w, const char* what, const Error& says) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(w.timeout_s);
  const int count = static_cast<int>(w.requests.size());
  for (int64_t polls = 0;; ++polls) {
    // One request at a time, so that those complete stay marked.
    int done = 1;
    for (int i = 0; i < count; ++i) {
      int flag = 0;
      const int status = MPI_Test(&w.requests[i], &flag, MPI_STATUS_IGNORE);
      if (status != MPI_SUCCESS) {
        const int r = i % (count / 2);
        const int missing = r < w.rank ? r : r + 1;
        tell(w, missing);
        return says("rank " + std::to_string(missing) + ": MPI lost it in " + what);
      }
      done = done && flag;
    }
    if (done) return 0;
    if (polls < 50) {
      std::this_thread::yield();
      continue;
    }
    const int told = heard_of(w);
    if (told >= 0) {
      w.failed = true;
      return says(missing_text(told, what, w));
    }
    if (Clock::now() > deadline) {
      const int missing = first_open(w);
      tell(w, missing);
      return says(missing_text(missing, what, w));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(polls < 2000 ? 20 : 500));
  }
}

int32_t exchange(talea_mpi_world* world, const void* const* send, void* const* recv, int64_t bytes,
                 const char* what, char* error, int64_t error_bytes) {
  talea_mpi_world& w = *world;
  const Error says{error, error_bytes};
  if (w.failed) return says("mpi: a rank of this world was lost earlier");
  if (recv[w.rank] != send[w.rank])
    std::memcpy(recv[w.rank], send[w.rank], static_cast<size_t>(bytes));
  w.requests.clear();
  for (const bool receives : {true, false})
    for (int r = 0; r < w.size; ++r) {
      if (r == w.rank) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      const int count = static_cast<int>(bytes);
      if (receives)
        MPI_Irecv(recv[r], count, MPI_BYTE, r, 0, w.data, &request);
      else
        MPI_Isend(send[r], count, MPI_BYTE, r, 0, w.data, &request);
      w.requests.push_back(request);
    }
  return w.requests.empty() ? 0 : wait(w, what, says);
}

// After a fault MPI_Finalize would wait for the lost rank for ever.
void close(talea_mpi_world* world) {
  if (!world->failed) {
    MPI_Comm_free(&world->data);
    MPI_Comm_free(&world->faults);
    if (world->started_here) MPI_Finalize();
  }
  delete world;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const talea_mpi_plugin* talea_mpi_plugin_entry() {
  static const talea_mpi_plugin plugin = {TALEA_MPI_PLUGIN_ABI, open, exchange,
                                          [](talea_mpi_world* w, double s) { w->timeout_s = s; },
                                          close};
  return &plugin;
}
