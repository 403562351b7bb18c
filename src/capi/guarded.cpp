// What: the last error text, the log callback and the mapping of exceptions to statuses.
// Why: kept apart from the functions so that the only catch is one screen long.
// Never: allocates on the failure path: the text of an out-of-memory error must survive it.
#include "capi/guarded.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "core/provenance.hpp"

namespace talea::capi {
namespace {

constexpr size_t text_bytes = 4096;
thread_local char last_error[text_bytes] = "";

struct Log {
  std::mutex mutex;
  talea_log_callback callback = nullptr;
  void* user = nullptr;
};

Log& the_log() {
  static Log instance;
  return instance;
}

}  // namespace

void set_last_error(std::string_view text) noexcept {
  const size_t n = std::min(text.size(), text_bytes - 1);
  std::memcpy(last_error, text.data(), n);
  last_error[n] = 0;
}

void log(int32_t level, std::string_view text) noexcept {
  try {
    talea_log_callback callback;
    void* user;
    {
      const std::lock_guard lock(the_log().mutex);
      callback = the_log().callback;
      user = the_log().user;
    }
    if (callback) callback(level, std::string(text).c_str(), user);
  } catch (...) {  // a log that fails must not fail the call it speaks of
  }
}

bool anybody_reads_the_log() noexcept {
  const std::lock_guard lock(the_log().mutex);
  return the_log().callback != nullptr;
}

talea_status status_of_current_exception() noexcept {
  talea_status status = TALEA_RUNTIME;
  try {
    throw;
  } catch (const Error& e) {
    status = static_cast<talea_status>(e.kind());
    set_last_error(e.what());
  } catch (const std::bad_alloc&) {
    set_last_error("out of host memory");
  } catch (const std::exception& e) {
    set_last_error(e.what());
  } catch (...) {
    set_last_error("unknown failure");
  }
  log(TALEA_LOG_ERROR, last_error);
  return status;
}

}  // namespace talea::capi

extern "C" {

const char* talea_version(void) { return TALEA_VERSION; }

const char* talea_build_revision(void) {
  static const std::string revision = [] {
    const talea::BuildInfo& build = talea::build_info();
    return build.git_revision + (build.git_dirty == 1 ? "-dirty" : "");
  }();
  return revision.c_str();
}

int32_t talea_abi_version(void) { return TALEA_ABI_VERSION; }

const char* talea_last_error(void) { return talea::capi::last_error; }

void talea_set_log_callback(talea_log_callback callback, void* user) {
  const std::lock_guard lock(talea::capi::the_log().mutex);
  talea::capi::the_log().callback = callback;
  talea::capi::the_log().user = user;
}

}  // extern "C"
