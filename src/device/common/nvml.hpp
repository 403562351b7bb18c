// What: clocks, power and throttle reasons of a device, from the driver's management library.
// Why: a timing without them cannot be compared with another run's.
// Never: changes a setting; a missing library is an answer without numbers.
#pragma once

#include "core/device_session.hpp"

namespace talea::device {

// pci_bus_id: as cudaDeviceGetPCIBusId writes it.
DeviceClocks read_clocks(const char* pci_bus_id);

}  // namespace talea::device
