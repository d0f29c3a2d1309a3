// A captured CUDA graph made ready to launch, with copies in front of it and behind it, as a graph of kernels.
//
// A driver launches a line of kernel nodes in a few microseconds however long it is, and starts anew at every fill: 61 fills of 768
// bytes cost a BERT-base 70 us a call. So copies are kernel nodes, and small fills and copies that were captured become such.
// A call whose addresses are those that an executable has changes nothing; other addresses are told to the driver first.

#pragma once

#include <iterator>
#include <vector>

#include "launch.h"

namespace cudal1 {

struct MemoryFill {  // CUDA_MEMSET_NODE_PARAMS of cuda.h
  uint64_t to;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
};
static_assert(sizeof(MemoryFill) == 40, "the layout that the driver writes");

struct MemoryCopy {  // CUDA_MEMCPY3D_v2 of cuda.h
  struct Side {
    size_t x, y, z, level;
    unsigned type;
    const void* host;
    uint64_t device;
    void *array, *reserved;
    size_t pitch, height;
  } from, to;
  size_t width, height, depth;
};
static_assert(sizeof(MemoryCopy) == 200, "the layout that the driver writes");

struct EdgeData {  // CUgraphEdgeData of cuda.h: how a node waits; not 0 where a kernel may begin before the one ahead has ended
  unsigned char words[8];
};

constexpr size_t widths[] = {16, 4, 1};  // bytes that one thread of a mover moves

struct CaptureApi {  // addresses in libcuda, and the kernels of torch_cudal1/device/cuda/copy_kernels.py by width; what has a comment may be null
  int (*clone)(void**, void*) = nullptr;
  int (*nodes)(void*, void**, size_t*) = nullptr;
  int (*edges)(void*, void**, void**, size_t*) = nullptr;
  int (*type)(void*, int*) = nullptr;
  int (*fill_of)(void*, MemoryFill*) = nullptr;
  int (*copy_of)(void*, MemoryCopy*) = nullptr;
  int (*add_kernel)(void**, void*, void* const*, size_t, const KernelNode*) = nullptr;
  int (*depend)(void*, void* const*, void* const*, size_t) = nullptr;
  int (*destroy_node)(void*) = nullptr;
  int (*instantiate)(void**, void*, unsigned long long) = nullptr;
  int (*set_kernel)(void*, void*, const KernelNode*) = nullptr;
  int (*destroy_executable)(void*) = nullptr;
  int (*destroy_graph)(void*) = nullptr;
  int (*edges_with_data)(void*, void**, void**, EdgeData*, size_t*) = nullptr;  // null before driver 12.3, whose edges have no data
  void* copy[std::size(widths)] = {};  // null: no kernels
  void* fill[std::size(widths)] = {};  // as `copy`
};

constexpr size_t most_by_kernel = 4 << 20;  // bytes; for more, the device's own copies are faster and the host's time does not matter

struct Passage {  // between a buffer of the graph and memory that may be elsewhere at every call
  uint64_t inside;
  size_t bytes;
  bool inward;  // into the graph's buffer, before the graph; otherwise out of it, after the graph
  bool is_node() const { return bytes <= most_by_kernel; }
};

class Executable {
 public:
  // `captured` is a CUgraph that outlives this.
  Executable(const CaptureApi& api, void* captured) : api_(api), captured_(captured) {}
  ~Executable() {  // the driver lets a graph that still runs come to its end
    if (handle_ != nullptr) api_.destroy_executable(handle_);
    if (graph_ != nullptr) api_.destroy_graph(graph_);
  }
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  // Each returns the result of the driver's call that failed, or 0. After a failure there is nothing that may be launched.
  int build();  // as it was captured
  int build_with(const std::vector<Passage>& passages, const std::vector<uint64_t>& outside);  // those that are nodes, other ends
  int move(const std::vector<uint64_t>& outside);  // the other ends from the next launch on
  bool has(const std::vector<uint64_t>& outside) const;  // whether these are its other ends
  size_t node_count() const { return node_count_; }      // once it was built with passages
  void* handle() const { return handle_; }

 private:
  struct Known {
    Passage passage;
    size_t position;  // in `outside`
    uint64_t outside;
    void* node;
  };
  struct Lines;
  int replace_others(Lines& lines);
  int add_copies(const Lines& lines);

  const CaptureApi api_;
  void *captured_, *graph_ = nullptr, *handle_ = nullptr;
  size_t node_count_ = 0;
  std::vector<Known> known_;
};

}  // namespace cudal1
