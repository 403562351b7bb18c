// What: the C structs as the C++ values of the operator.
// Why: every field is checked once, at the door: sizes, enums, ranks, extents.
// Never: touches tensor memory.
#pragma once

#include <memory>

#include "talea/linear_cross_entropy.hpp"
#include "talea/talea.h"

namespace talea::capi {

// optional: rank, size and device are all that is asked of a table without functions.
enum class Callbacks { needed, optional };

// A communicator made of the caller's functions.
std::unique_ptr<Communicator> make_communicator(const char* name, const talea_communicator* c,
                                                Callbacks callbacks);

struct Arguments {
  LinearCrossEntropyInputs inputs;
  LinearCrossEntropyOutputs outputs;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyRanks ranks;
  Workspace workspace;
  Stream stream = nullptr;
  std::unique_ptr<Communicator> vocab, batch;  // what ranks points to
};

// question: touches no data; null tensor addresses are replaced by distinct made-up ones.
enum class Purpose { call, phases, question };

// Throws Error(usage) for a struct, enum or pointer that is wrong in itself.
Arguments convert(const talea_linear_cross_entropy_args* args, Purpose purpose);

void write_defaults(talea_linear_cross_entropy_options* options, int64_t struct_bytes);

}  // namespace talea::capi
