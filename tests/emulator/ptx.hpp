// What: the interface between the runtime (cudart.cpp, what the program links) and the interpreter of
// PTX (interp*.cpp): modules of PTX text, their kernels and symbols, a launch that runs to its end.
// Why: kernels of Hopper run, slowly and exactly as PTX says, on a machine without a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emu {

// Thrown by a launch: out of bounds, misaligned, deadlock, an instruction that is not known, a trap.
// what() names kernel, PTX line (and .loc file:line where the PTX has it), block, thread.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct Launch {
  Dim3 grid, block, cluster;
  uint32_t dynamic_shared = 0;
};

struct ParamInfo {
  uint32_t offset, size;  // within the parameter block, which the runtime gathers from args[]
};

struct KernelInfo {
  std::string name;
  std::vector<ParamInfo> params;
  uint32_t static_shared = 0;
  uint32_t max_threads = 1024;  // .maxntid, if given
  Dim3 required_cluster;        // .reqnctapercluster, if given; else 1,1,1
};

// Ranges of "device" memory, which are host addresses; every global access must lie in one.
struct Memory {
  static void add(const void* begin, uint64_t bytes);
  static void remove(const void* begin);
  static bool holds(const void* begin, uint64_t bytes);
};

class Module {
 public:
  virtual ~Module() = default;
  static std::unique_ptr<Module> load(const std::string& ptx);
  virtual const KernelInfo* kernel(const std::string& name) const = 0;
  virtual void* symbol(const std::string& name, uint64_t* bytes) = 0;  // .global, .const; null if none
  // Runs all blocks of the grid to the end; params is the block laid out as KernelInfo says.
  virtual void launch(const std::string& kernel, const Launch& launch, const void* params) = 0;
};

// A tensor map as this runtime's cuTensorMapEncodeTiled writes it into the 128 opaque bytes of a
// CUtensorMap and the interpreter reads it back.
struct TensorMap {
  uint32_t magic = 0x7a1eau;
  uint8_t type;          // CUtensorMapDataType
  uint8_t rank;          // 1..5
  uint8_t interleave, swizzle, oob_fill;
  uint8_t element_bytes;
  uint64_t address;
  uint64_t size[5];
  uint64_t stride[4];    // bytes, of axes 1..4 (only rank-1 of them); a stride below 2^40
  uint16_t box[5];       // <= 256
};
// It must fit 128 bytes: pack it as you like (e.g. 32-bit sizes); both sides use pack/unpack below.
void pack(const TensorMap& map, void* to_128_bytes);
TensorMap unpack(const void* from_128_bytes);

}  // namespace emu
