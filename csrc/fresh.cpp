#include "fresh.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

namespace cudal1 {

namespace {

// Whether a mode, a transform or a tracer would see the operator, or it would fill the memory.
bool somebody_looks_on() {
  const c10::DispatchKeySet usual({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView});
  if (!(c10::impl::tls_local_dispatch_key_set().included_ - usual).empty()) return true;
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

std::atomic<c10::Allocator*> known[2];  // of the CPU, of CUDA: what at::empty_strided was seen to use

}  // namespace

at::Tensor fresh(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (!(device.is_cpu() || device.is_cuda()) || somebody_looks_on()) return at::empty_strided(sizes, strides, options);
  std::atomic<c10::Allocator*>& allocator = known[device.is_cuda()];
  if (c10::Allocator* const found = allocator.load(std::memory_order_acquire)) {
    const c10::DispatchKeySet keys(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, found, keys, dtype));
  }
  at::Tensor first = at::empty_strided(sizes, strides, options);  // from here on PyTorch lets nobody change CUDA's allocator
  allocator.store(first.storage().allocator(), std::memory_order_release);
  return first;
}

}  // namespace cudal1
