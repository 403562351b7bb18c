// What: opens talea_mpi.so at run time and makes a communicator of it.
// Why: MPI is an option of the machine, not of the build; without it the error says what is
// missing.
// Never: includes mpi.h.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>

#include "core/fail.hpp"
#include "dist/host_collectives.hpp"
#include "dist/mpi_plugin.h"
#include "talea/ranks.hpp"

namespace talea {
namespace {

namespace fs = std::filesystem;
constexpr int64_t text_bytes = 512;

class MpiCommunicator final : public HostCommunicator {
 public:
  MpiCommunicator(const talea_mpi_plugin& plugin, talea_mpi_world* world, int rank, int size)
      : HostCommunicator(rank, size), plugin_(plugin), world_(world) {}
  ~MpiCommunicator() override { plugin_.close(world_); }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  const char* engine() const override { return "mpi"; }
  void set_timeout(double seconds) override { plugin_.set_timeout(world_, seconds); }

 protected:
  void exchange(const void* const* send, void* const* recv, int64_t bytes,
                const char* what) override {
    char error[text_bytes];
    if (plugin_.exchange(world_, send, recv, bytes, what, error, text_bytes) != 0)
      fail(ErrorKind::runtime, "{}", error);
  }

 private:
  const talea_mpi_plugin& plugin_;
  talea_mpi_world* world_;
};

// The library or program that holds this code; the plug-in lies in its folder or in lib/.
fs::path own_file() {
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&own_file), &info);
  const std::string name = info.dli_fname ? info.dli_fname : "";
  std::error_code none;
  // A program that the shell found is known by the word it was called by, which names no file.
  const bool called = name.find('/') == std::string::npos;
  return fs::canonical(called ? "/proc/self/exe" : name, none);
}

const talea_mpi_plugin& load(const std::string& named) {
  const std::string file = named.empty() ? mpi_plugin() : named;
  require(!file.empty(), ErrorKind::unavailable,
          "mpi: no talea_mpi.so beside {} (build with -DTALEA_MPI=ON)", own_file().string());
  // Global, because OpenMPI opens components of its own that need its symbols.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  require(handle, ErrorKind::unavailable, "mpi: {}", handle ? "" : dlerror());
  auto entry =
      reinterpret_cast<decltype(&talea_mpi_plugin_entry)>(dlsym(handle, "talea_mpi_plugin_entry"));
  require(entry, ErrorKind::unavailable, "mpi: {} is not a plug-in of talea", file);
  const talea_mpi_plugin* plugin = entry();
  require(plugin->abi == TALEA_MPI_PLUGIN_ABI, ErrorKind::unavailable,
          "mpi: {} has plug-in version {}, {} is needed", file, plugin->abi, TALEA_MPI_PLUGIN_ABI);
  return *plugin;
}

// Every rank leaves a file on arrival; who left none has not come.
void announce(const MpiOptions& o) {
  if (o.presence_dir.empty() || o.launcher_rank < 0) return;
  std::error_code none;
  fs::create_directories(o.presence_dir, none);
  std::ofstream(fs::path(o.presence_dir) / std::to_string(o.launcher_rank));
}

// All have come: the folder has served. The last to leave finds it empty.
void clear(const MpiOptions& o) {
  if (o.presence_dir.empty() || o.launcher_rank < 0) return;
  std::error_code none;
  fs::remove(fs::path(o.presence_dir) / std::to_string(o.launcher_rank), none);
  fs::remove(o.presence_dir, none);
}

std::string absent(const MpiOptions& o) {
  std::string names;
  std::error_code none;
  for (int r = 0; !o.presence_dir.empty() && r < o.launcher_size; ++r)
    if (!fs::exists(fs::path(o.presence_dir) / std::to_string(r), none))
      names += fmt::format("{}{}", names.empty() ? "rank " : ", ", r);
  return names.empty() ? names : names + ": ";
}

}  // namespace

std::string mpi_plugin() {
  std::error_code none;
  for (const char* place : {".", "../lib", "../lib/talea", "../../lib"}) {
    const fs::path file = own_file().parent_path() / place / "talea_mpi.so";
    if (fs::exists(file, none)) return file.lexically_normal().string();
  }
  return {};
}

std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options) {
  require(options.timeout_s > 0, ErrorKind::usage, "timeout = {} s: must be > 0",
          options.timeout_s);
  const talea_mpi_plugin& plugin = load(options.plugin);
  announce(options);
  talea_mpi_world* world = nullptr;
  int32_t rank = 0, size = 1;
  char error[text_bytes];
  if (plugin.open(options.timeout_s, &world, &rank, &size, error, text_bytes) != 0)
    fail(ErrorKind::runtime, "{}{}", absent(options), error);
  clear(options);
  return std::make_unique<MpiCommunicator>(plugin, world, rank, size);
}

}  // namespace talea
