// What: see ranks.hpp.
// Why: see ranks.hpp.
// Never: joins MPI where --ranks and mpirun are both absent.
#include "ranks.hpp"

#include <unistd.h>

#include <cstdlib>
#include <exception>

#include "core/fail.hpp"

namespace talea::cli {
namespace {

struct Launcher {
  int rank = -1, size = 0;
  std::string job;
};

// OpenMPI's variables, then those of MPICH and Slurm's PMI.
Launcher launcher() {
  Launcher l;
  for (const auto& [rank, size] : {std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                                   std::pair("PMI_RANK", "PMI_SIZE")}) {
    const char *r = std::getenv(rank), *s = std::getenv(size);
    if (!r || !s) continue;
    l.rank = std::atoi(r);
    l.size = std::atoi(s);
    break;
  }
  const char *job = std::getenv("OMPI_MCA_orte_hnp_uri"),
             *here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (!job) job = std::getenv("PMIX_NAMESPACE");              // OpenMPI 5
  if (job && here && std::atoi(here) == l.size) l.job = job;  // one host: all see the folder
  return l;
}

// A folder that all processes of this job on this host find, and no other job: who has come leaves
// a file there, so that an absent rank can be named.
std::string presence_folder(const Launcher& l) {
  if (l.job.empty()) return "";
  const char* temporary = std::getenv("TMPDIR");
  return fmt::format("{}/talea-ranks-{}-{:x}", temporary ? temporary : "/tmp", ::getuid(),
                     std::hash<std::string>{}(l.job));
}

}  // namespace

bool under_mpirun() { return launcher().size > 0; }

void RankFlags::add(CLI::App& sub) {
  sub.add_option(
         "--ranks", ranks,
         "vocabulary shards, as threads of this process; mpirun -n R runs them as processes")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub.add_flag("--sequence-parallel", sequence_parallel,
               "each rank holds its share of the tokens: gathered in, reduce-scattered out");
  sub.add_option("--rank-timeout", timeout_s, "seconds that a rank waits for the others")
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
}

void RankFlags::add_dx_sum(CLI::App& sub) {
  sub.add_option("--dx-sum", dx_sum, "in what the ranks' shares of dX are summed")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
}

RankWorld::RankWorld(const RankFlags& flags)
    : size_(flags.ranks),
      timeout_s_(flags.timeout_s),
      dx_sum_(flags.dx_sum == "bf16" ? DType::bf16 : DType::f32) {
  const Launcher l = launcher();
  require(l.size > 0 || size_ > 1 || dx_sum_ == DType::f32, ErrorKind::usage,
          "--dx-sum bf16: needs --ranks, whose shares are summed");
  if (l.size == 0) return;
  require(flags.ranks == 1 || flags.ranks == l.size, ErrorKind::usage,
          "--ranks {}: mpirun started {} processes, and they are the ranks", flags.ranks, l.size);
  MpiOptions o;
  o.timeout_s = timeout_s_;
  o.launcher_rank = l.rank;
  o.launcher_size = l.size;
  o.presence_dir = presence_folder(l);
  mpi_ = make_mpi_communicator(o);
  size_ = mpi_->size();
}

RankWorld::~RankWorld() {
  if (std::uncaught_exceptions() > 0) mpi_.release();
}

lce::ShardedResult RankWorld::call(const lce::ShardedCall& whole) const {
  lce::ShardedCall own = whole;
  own.dx_sum = dx_sum_;
  return mpi_ ? run_shard(own, *mpi_, false) : run_thread_shards(own, size_, timeout_s_);
}

void add_ranks(const RankWorld& world, const std::vector<lce::ShardFigures>& ranks,
               lce::CallFacts& facts) {
  facts.collective = world.engine();
  facts.shards.clear();
  for (size_t r = 0; r < ranks.size(); ++r) {
    const lce::ShardFigures& f = ranks[r];
    facts.shards.push_back({static_cast<int>(r), f.begin, f.end});
    facts.result.notes.push_back(
        fmt::format("rank {} of {}: vocabulary rows [{}, {}), {} stored; {} targets in the "
                    "partition; {} workspace bytes; {:.3f} ms",
                    r, ranks.size(), f.begin, f.end, f.stored, f.targets_in_partition,
                    f.workspace_bytes, f.ms));
  }
}

}  // namespace talea::cli
