// What: see ranks.hpp.
// Why: see ranks.hpp.
// Never: joins MPI where --ranks and mpirun are both absent.
#include "ranks.hpp"

#include <unistd.h>

#include <CLI/CLI.hpp>
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

void RankFlags::add(CLI::App& sub, const char* what) {
  sub.add_option(
         "--ranks", ranks,
         fmt::format("{}, as threads of this process; mpirun -n R runs them as processes", what))
      ->check(CLI::Range(1, 1024))
      ->each([this](const std::string&) { said = true; })
      ->capture_default_str();
}

void RankFlags::add_timeout(CLI::App& sub) {
  sub.add_option("--rank-timeout", timeout_s, "seconds that a rank waits for the others")
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
}

RankWorld::RankWorld(const RankFlags& flags) : size_(flags.ranks), timeout_s_(flags.timeout_s) {
  const Launcher l = launcher();
  require(l.size > 0 || flags.said || timeout_s_ == default_rank_timeout_s, ErrorKind::usage,
          "--rank-timeout {}: needs --ranks", timeout_s_);
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

}  // namespace talea::cli
