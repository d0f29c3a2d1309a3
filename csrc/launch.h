// One kernel launch of a Program, packed once: a call only writes the pointers of its tensors and the stream of the moment.
//
// The driver's functions are addresses that torch_cudal1/device/cuda/driver.py found in libcuda at run time, so nothing here needs CUDA's headers or
// library. What is checked at every call: that each tensor is on the plan's device, and aligned where the kernel assumes so. That a
// kernel stays inside its buffers is the judge's work; loading modules is driver.py's.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace cudal1 {

// CUlaunchAttribute and CUlaunchConfig of cuda.h, whose layout has not changed since CUDA 11.8.
struct LaunchAttribute {
  int id;
  char pad[4];
  uint32_t value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "the layout that the driver reads");

struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h
  void* function;
  unsigned grid[3], block[3], shared_bytes;
  void** parameters;
  void** extra;
  void *kernel, *context;
};
static_assert(sizeof(KernelNode) == 72, "the layout that the driver reads");

struct GraphApi {  // addresses in libcuda; null where the driver lacks one
  int (*capture_status)(void*, int*) = nullptr;
  int (*replay)(void*, void*) = nullptr;
  int (*make_graph)(void**, unsigned) = nullptr;
  int (*add_kernel)(void**, void*, void* const*, size_t, const KernelNode*) = nullptr;
  int (*instantiate)(void**, void*, unsigned long long) = nullptr;
  int (*set_kernel)(void*, void*, const KernelNode*) = nullptr;
  int (*destroy_executable)(void*) = nullptr;
  int (*destroy_graph)(void*) = nullptr;
};

struct Driver {  // addresses in libcuda, the primary context of the plan's device, and PyTorch's way to tell its current stream
  void* context = nullptr;
  int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
  int (*get_current)(void**) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int32_t (*current_stream)(int32_t, void**) = nullptr;
  GraphApi graphs;  // all or none
};

// A value that does not fit; becomes a ValueError at the boundary. Its text is put together without streams: c10::str, and with it every
// TORCH_CHECK that prints values, crashed here on one machine (torch 2.11, Python 3.12, g++ 13), for a reason that was not found.
struct WrongValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What went wrong in a launch; becomes a Python exception that names the kernel at the boundary.
struct LaunchFailure : std::exception {
  enum Kind : int { absent, elsewhere, misaligned, refused, no_stream, no_context };
  LaunchFailure(Kind kind, const std::string* symbol, int64_t value, int64_t detail)
      : kind(kind), symbol(symbol), value(value), detail(detail) {}
  const char* what() const noexcept override { return "a kernel launch failed"; }
  Kind kind;
  const std::string* symbol;  // nullptr: before any launch
  int64_t value, detail;      // number of the value and its device or address; or the driver's result
};

// The plan's context is this thread's current one while this lives.
class InContext {
 public:
  explicit InContext(const Driver& driver) : driver_(driver) {
    void* current = nullptr;
    check(driver.get_current(&current));
    if (current == driver.context) return;
    check(driver.push(driver.context));
    pushed_ = true;
  }
  ~InContext() {
    void* popped = nullptr;
    if (pushed_) driver_.pop(&popped);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  static void check(int status) {
    if (status != 0) throw LaunchFailure(LaunchFailure::no_context, nullptr, 0, status);
  }
  const Driver& driver_;
  bool pushed_ = false;
};

inline void* stream_of(const Driver& driver, c10::Device device) {
  void* stream = nullptr;
  const int32_t index = device.has_index() ? device.index() : 0;
  if (const int32_t status = driver.current_stream(index, &stream))
    throw LaunchFailure(LaunchFailure::no_stream, nullptr, index, status);
  return stream;
}

struct Pointer {  // which parameter gets the address of which value
  uint32_t parameter;
  int32_t value;
  uint64_t mask;  // of address bits that must be 0
};

struct LaunchStep {
  std::string symbol;
  void* function = nullptr;
  LaunchConfig config{};
  std::vector<LaunchAttribute> attributes;
  std::vector<uint64_t> parameters;  // little-endian: a narrower parameter is the first bytes of its slot
  std::vector<Pointer> pointers;

  // Start it with these parameter words, on this stream.
  void start(const Driver& driver, void* stream, uint64_t* words) const {
    c10::SmallVector<void*, 24> places;
    for (size_t i = 0; i < parameters.size(); ++i) places.push_back(words + i);
    LaunchConfig now = config;
    now.stream = stream;
    now.attributes = attributes.empty() ? nullptr : attributes.data();
    if (const int status = driver.launch(&now, function, places.data(), nullptr))
      throw LaunchFailure(LaunchFailure::refused, &symbol, 0, status);
  }
};

}  // namespace cudal1
