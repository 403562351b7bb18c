// What: lets one thread at a time into a library that is not safe for more, until it is ended.
// Why: a watchdog and its caller share one communicator; NCCL's state of it must not see both.
// Never: waits for a call that may last: try_run leaves instead.
#pragma once

#include <mutex>

namespace talea {

class SerialCalls {
 public:
  // What `call` returns; `otherwise` after the end.
  template <typename Result, typename Call>
  Result run(Result otherwise, Call call) {
    const std::lock_guard lock(mutex_);
    return ended_ ? otherwise : call();
  }
  // `otherwise` also while another thread is inside.
  template <typename Result, typename Call>
  Result try_run(Result otherwise, Call call) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return !lock || ended_ ? otherwise : call();
  }
  // The last call: none is inside, and none comes after it. A second end does nothing.
  template <typename Call>
  void end(Call call) {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    call();
  }

 private:
  std::mutex mutex_;
  bool ended_ = false;
};

}  // namespace talea
