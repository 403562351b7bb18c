// What: a device named on the command line, and a call on it with tensors that lie in host memory.
// Why: `talea loss` reads files; a lane of a device wants its tensors there, and they come back.
// Never: includes a CUDA header; the device session knows the runtime.
#pragma once

#include <memory>

#include "call.hpp"
#include "core/device_session.hpp"
#include "core/receipt.hpp"

namespace talea::cli {

struct Device {
  int index = 0;
  std::unique_ptr<DeviceSession> session;  // null: the host
};

// "cpu", "cuda" or "cuda:1"; "auto": where the lane named runs. Error(usage) of another word or of
// a lane that runs elsewhere, Error(unavailable) where there is no such device.
Device open_device(const std::string& device, const std::string& lane);

// Its clocks: as they were read during the run, at least once.
DeviceProvenance device_provenance(DeviceSession& session, const std::vector<DeviceClocks>& all);

// Inputs and outputs lie in host memory; the time is of the call alone, with its one
// synchronisation. Extra memory: the workspace, and what the device has less after the call.
MeasuredCall call_on_device(Device& device, const LinearCrossEntropyInputs& in,
                            const LinearCrossEntropyOutputs& out,
                            const LinearCrossEntropyOptions& options);

}  // namespace talea::cli
