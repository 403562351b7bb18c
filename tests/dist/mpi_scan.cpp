// What: the scan's call of mpi_calls.hpp.
// Why: its cases bear the names of the loss's.
// Never: judges a value.
#include "dist/mpi_calls.hpp"
#include "ops/mamba3/cuts.hpp"

namespace talea::testing {

void call_scan(Communicator& c, Bad bad) {
  using namespace yardsticks::mamba3;
  const int64_t each = 4, first = c.rank() * each;
  Case own = tokens_of(usual(each * c.size()), first, first + each);
  if (bad == Bad::option) own.options.norm_eps = 0.25;
  How how;
  how.ranks.sequence = &c;
  how.ranks.token_begin = first;
  run("cpu", own, how);
}

}  // namespace talea::testing
