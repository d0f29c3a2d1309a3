#include "group.h"

#include <algorithm>

namespace cudal1 {

namespace {

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: in this graph a kernel begins when the one ahead has ended, which serves it as well
constexpr int early_start = 6;

struct Filled {  // the description of one launch with its parameters in place
  KernelNode node{};
  c10::SmallVector<void*, 24> places;

  Filled(const LaunchStep& launch, uint64_t* words) {
    for (size_t i = 0; i < launch.parameters.size(); ++i) places.push_back(words + i);
    node.function = launch.function;
    std::copy_n(launch.config.grid, 3, node.grid);
    std::copy_n(launch.config.block, 3, node.block);
    node.shared_bytes = launch.config.shared_bytes;
    node.parameters = places.data();
  }
};

}  // namespace

bool LaunchGroup::build(uint64_t* words) {  // a chain: in a stream, each launch waits for the one before it
  if (api_.make_graph(&graph_, 0) != 0) return false;
  const uint64_t* const begin = words;
  for (const LaunchStep& launch : launches) {
    const auto is_early_start = [](const LaunchAttribute& attribute) { return attribute.id == early_start; };
    if (!std::all_of(launch.attributes.begin(), launch.attributes.end(), is_early_start)) return false;
    Filled filled(launch, words);
    void* node = nullptr;
    if (api_.add_kernel(&node, graph_, nodes_.empty() ? nullptr : &nodes_.back(), nodes_.empty() ? 0 : 1, &filled.node) != 0) return false;
    nodes_.push_back(node);
    words += launch.parameters.size();
  }
  last_.assign(begin, static_cast<const uint64_t*>(words));
  return api_.instantiate(&executable_, graph_, 0) == 0;
}

bool LaunchGroup::update(uint64_t* words) {
  uint64_t* known = last_.data();
  for (size_t i = 0; i < launches.size(); ++i) {
    const size_t count = launches[i].parameters.size();
    if (!std::equal(words, words + count, known)) {
      Filled filled(launches[i], words);
      if (api_.set_kernel(executable_, nodes_[i], &filled.node) != 0) return false;
      std::copy_n(words, count, known);
    }
    words += count, known += count;
  }
  return true;
}

// Whether a graph with these parameters pays: always for several launches, for one from the second such call in a row on.
bool LaunchGroup::is_worth_it(const uint64_t* words) {
  if (launches.size() > 1) return true;
  const size_t count = launches.front().parameters.size();
  if (executable_ != nullptr && std::equal(last_.begin(), last_.end(), words)) {
    met_.clear();
    return true;
  }
  const bool again = met_.size() == count && std::equal(met_.begin(), met_.end(), words);
  met_.assign(words, words + count);
  return again;
}

bool LaunchGroup::as_graph(const Driver& driver, void* stream, uint64_t* words) {
  int capturing = 0;
  if (driver.graphs.capture_status(stream, &capturing) != 0 || capturing != 0) return false;
  const std::lock_guard<std::mutex> turn(turn_);  // changes hold for the next launch of the graph: that must be ours
  if (refused_ || !is_worth_it(words)) return false;
  api_ = driver.graphs;
  if (!(executable_ == nullptr ? build(words) : update(words))) {
    refused_ = true;  // whatever it was, launching one by one says it by name or works
    return false;
  }
  if (const int status = api_.replay(executable_, stream))
    throw LaunchFailure(LaunchFailure::refused, &launches.front().symbol, 0, status);
  return true;
}

}  // namespace cudal1
