// What: clocks, power and throttle reasons of a device, from the driver's management library.
// Why: a timing without them cannot be compared with another run's.
// Never: changes a setting; a missing library is an answer without numbers.
#include "device/common/nvml.hpp"

#include <dlfcn.h>

namespace talea::device {
namespace {

// The few functions and constants of libnvidia-ml.so.1 in use, as its documentation gives them.
using Handle = void*;
struct Library {
  int (*init)() = nullptr;
  int (*by_bus)(const char*, Handle*) = nullptr;
  int (*clock)(Handle, int, unsigned*) = nullptr;
  int (*power)(Handle, unsigned*) = nullptr;
  int (*power_limit)(Handle, unsigned*) = nullptr;
  int (*temperature)(Handle, int, unsigned*) = nullptr;
  int (*reasons)(Handle, unsigned long long*) = nullptr;
  int (*driver)(char*, unsigned) = nullptr;
  bool usable = false;
};

Library load() {
  Library l;
  void* handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return l;
  auto find = [&](auto& member, const char* symbol) {
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(dlsym(handle, symbol));
  };
  find(l.init, "nvmlInit_v2");
  find(l.by_bus, "nvmlDeviceGetHandleByPciBusId_v2");
  find(l.clock, "nvmlDeviceGetClockInfo");
  find(l.power, "nvmlDeviceGetPowerUsage");
  find(l.power_limit, "nvmlDeviceGetEnforcedPowerLimit");
  find(l.temperature, "nvmlDeviceGetTemperature");
  find(l.reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
  find(l.driver, "nvmlSystemGetDriverVersion");
  l.usable = l.init && l.by_bus && l.clock && l.init() == 0;
  return l;
}

std::string name_reasons(unsigned long long bits) {
  constexpr struct {
    unsigned long long bit;
    const char* name;
  } known[] = {{0x1, "idle"},        {0x2, "application clocks"}, {0x4, "power cap"},
               {0x8, "hw slowdown"}, {0x10, "sync boost"},        {0x20, "sw thermal"},
               {0x40, "hw thermal"}, {0x80, "hw power brake"},    {0x100, "display clocks"}};
  std::string text;
  for (const auto& [bit, name] : known)
    if (bits & bit) text += (text.empty() ? "" : ", ") + std::string(name);
  return text.empty() ? "none" : text;
}

}  // namespace

DeviceClocks read_clocks(const char* pci_bus_id) {
  static const Library library = load();
  DeviceClocks c;
  Handle device = nullptr;
  if (!library.usable || library.by_bus(pci_bus_id, &device) != 0) return c;
  constexpr int sm_clock = 1, memory_clock = 2, core_sensor = 0;
  unsigned value = 0;
  if (library.clock(device, sm_clock, &value) == 0) c.sm_mhz = static_cast<int>(value);
  if (library.clock(device, memory_clock, &value) == 0) c.memory_mhz = static_cast<int>(value);
  if (library.power && library.power(device, &value) == 0) c.power_watts = value / 1000.0;
  if (library.power_limit && library.power_limit(device, &value) == 0)
    c.power_limit_watts = value / 1000.0;
  if (library.temperature && library.temperature(device, core_sensor, &value) == 0)
    c.temperature_c = static_cast<int>(value);
  unsigned long long bits = 0;
  if (library.reasons && library.reasons(device, &bits) == 0)
    c.throttle_reasons = name_reasons(bits);
  char text[96] = {};
  if (library.driver && library.driver(text, sizeof(text)) == 0) c.driver = text;
  return c;
}

}  // namespace talea::device
