// Fresh memory for results, and the device on which it is made, for less than the dispatcher and a device guard cost.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace cudal1 {

// A tensor as at::empty_strided makes it; `device` must be the current one. Needs no GIL.
at::Tensor fresh(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device);

class OnDevice {  // `device` is current while this lives; where it is already, that costs one question
 public:
  explicit OnDevice(c10::Device device) {
    if (!device.is_cpu() && c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) guard_.emplace(device);
  }

 private:
  std::optional<c10::DeviceGuard> guard_;
};

}  // namespace cudal1
