// Consecutive launches of a Program, enqueued together: as one CUDA graph of kernel nodes, because launching a graph costs the host
// about as much as launching one kernel. A call only tells the graph which parameters changed since the last one.
//
// Launching a graph that is as it was costs the host less than launching one kernel, changing a node first costs more. So a single
// launch goes as a graph while its parameters stay the same, and directly when they are new.
//
// Where a graph cannot serve (clusters, a stream that is being captured, a driver that refuses) they are launched one by one, with
// the same effect.

#pragma once

#include <mutex>
#include <utility>

#include "launch.h"

namespace cudal1 {

class LaunchGroup {
 public:
  std::vector<LaunchStep> launches;

  LaunchGroup() = default;
  LaunchGroup(LaunchGroup&& other) noexcept : launches(std::move(other.launches)) {}  // before the first run
  LaunchGroup& operator=(LaunchGroup&&) = delete;
  ~LaunchGroup() {  // the driver lets a graph that still runs come to its end
    if (executable_ != nullptr) api_.destroy_executable(executable_);
    if (graph_ != nullptr) api_.destroy_graph(graph_);
  }

  // `address(step, value)` is where that value lies on the device.
  template <typename Address>
  void run(const Driver& driver, void* stream, Address address) {
    c10::SmallVector<uint64_t, 64> words;
    for (const LaunchStep& launch : launches) {
      const size_t first = words.size();
      words.append(launch.parameters.begin(), launch.parameters.end());
      for (const Pointer& pointer : launch.pointers) {
        const uint64_t found = address(launch, pointer.value);
        if (found & pointer.mask)
          throw LaunchFailure(LaunchFailure::misaligned, &launch.symbol, pointer.value, static_cast<int64_t>(found));
        words[first + pointer.parameter] = found;
      }
    }
    if (driver.graphs.replay != nullptr && as_graph(driver, stream, words.data())) return;
    uint64_t* next = words.data();
    for (const LaunchStep& launch : launches) {
      launch.start(driver, stream, next);
      next += launch.parameters.size();
    }
  }

 private:
  std::mutex turn_;
  GraphApi api_;
  void *graph_ = nullptr, *executable_ = nullptr;
  std::vector<void*> nodes_;
  std::vector<uint64_t> last_;  // the parameters that the graph has
  std::vector<uint64_t> met_;   // those of the last call, if one launch went directly in it
  bool refused_ = false;

  bool as_graph(const Driver& driver, void* stream, uint64_t* words);
  bool is_worth_it(const uint64_t* words);
  bool build(uint64_t* words);
  bool update(uint64_t* words);
};

}  // namespace cudal1
