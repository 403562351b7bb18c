// What: how a library beside the program (the stand-in libcublasLt) queues work on the program's stand-in runtime.
// Why: the runtime is linked statically and exports nothing; a stream's handle points to this table, and the
// environment variable EMU_CUDART holds the address of the table of the null stream.
#pragma once
#include <cstdint>

namespace emu {

struct StreamAbi {
  static constexpr uint64_t kMagic = 0x7a1ea57265616d31ull;
  uint64_t magic = kMagic;
  // Runs work(data) in the stream's order (or records it, under capture), then destroy(data) once no
  // more needed. work returns 0 or a cudaError_t that becomes the device's. Returns a cudaError_t.
  int (*submit)(void* stream, const char* name, int (*work)(void*), void* data, void (*destroy)(void*)) = nullptr;
  bool (*holds)(const void* begin, uint64_t bytes) = nullptr;
};

}  // namespace emu
