// What: SHA-256 (FIPS 180-4).
// Why: a receipt names its inputs by a hash that anybody can compute with a stock tool.
// Never: used for secrets; it is neither constant-time nor fast.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace talea::io {

class Sha256 {
 public:
  void add(const void* data, int64_t bytes);
  std::string hex();  // finishes; add nothing afterwards

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_{0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  std::array<uint8_t, 64> pending_{};
  uint64_t total_bytes_ = 0;
};

std::string sha256_hex(std::string_view bytes);

}  // namespace talea::io
