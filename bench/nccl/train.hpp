// What: a small model trained by world 1 and by world R side by side.
// Why: losses that stay equal over hundreds of updates show more than one call can.
// Never: times anything.
#pragma once

#include "bench/nccl/world.hpp"

namespace talea::bench {

// 500 updates of a bigram model over `vocab` words; the receipt's section.
nlohmann::json train_both(World& world, DeviceSession& device, const std::string& lane,
                          int64_t vocab, bool& passed);

}  // namespace talea::bench
